// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {EnumerableSet} from "@openzeppelin/contracts/utils/structs/EnumerableSet.sol";

/// @notice What the registry asks of the court.
interface IBarred {
    function isBarred(address owner) external view returns (bool);
}

/// @title Which node keys work for which owner
/// @notice A node key signs work and cannot move stake. Its owner binds it with the node key's consent, together
/// with the libp2p peer id it is reached under. An owner whose fraud was upheld binds no more nodes.
contract NodeRegistry is EIP712 {
    using EnumerableSet for EnumerableSet.AddressSet;

    uint256 public constant MAX_NODES_PER_OWNER = 128;
    uint256 public constant MAX_PEER_ID_BYTES = 64;

    bytes32 public constant BINDING_TYPEHASH =
        keccak256("Binding(address owner,address node,bytes peerId,uint256 nonce,uint256 deadline)");

    struct Binding {
        address owner;
        uint48 boundAt;
        uint48 boundBlock;
        bytes peerId;
    }

    IBarred public immutable court;

    /// @notice Next nonce a node key signs: a binding signature is good once.
    mapping(address node => uint256) public nonces;

    mapping(address node => Binding) private _bindings;
    mapping(address owner => EnumerableSet.AddressSet) private _nodesOf;

    event NodeBound(address indexed owner, address indexed node, bytes peerId);
    event NodeUnbound(address indexed owner, address indexed node);

    error NodeRegistryZeroAddress();
    error NodeRegistryInvalidPeerId(uint256 length);
    error NodeRegistryExpired(uint256 deadline);
    error NodeRegistryAlreadyBound(address node, address owner);
    error NodeRegistryTooManyNodes(address owner);
    error NodeRegistryBarred(address owner);
    error NodeRegistryWrongSigner(address signer);
    error NodeRegistryNotBound(address node);
    error NodeRegistryNotAllowed(address caller);

    constructor(address court_) EIP712("Intellect NodeRegistry", "1") {
        if (court_ == address(0)) revert NodeRegistryZeroAddress();
        court = IBarred(court_);
    }

    /// @notice Binds a node key to the caller.
    /// @param signature The node key's EIP-712 signature over Binding(caller, node, peerId, nonces(node), deadline).
    function bind(address node, bytes calldata peerId, uint256 deadline, bytes calldata signature) external {
        if (peerId.length == 0 || peerId.length > MAX_PEER_ID_BYTES) revert NodeRegistryInvalidPeerId(peerId.length);
        if (block.timestamp > deadline) revert NodeRegistryExpired(deadline);
        if (court.isBarred(msg.sender)) revert NodeRegistryBarred(msg.sender);
        Binding storage binding = _bindings[node];
        if (binding.owner != address(0)) revert NodeRegistryAlreadyBound(node, binding.owner);
        EnumerableSet.AddressSet storage nodes = _nodesOf[msg.sender];
        if (nodes.length() >= MAX_NODES_PER_OWNER) revert NodeRegistryTooManyNodes(msg.sender);
        bytes32 digest = _hashTypedDataV4(
            keccak256(abi.encode(BINDING_TYPEHASH, msg.sender, node, keccak256(peerId), nonces[node]++, deadline))
        );
        address signer = ECDSA.recover(digest, signature);
        if (signer != node) revert NodeRegistryWrongSigner(signer);
        binding.owner = msg.sender;
        binding.boundAt = uint48(block.timestamp);
        binding.boundBlock = uint48(block.number);
        binding.peerId = peerId;
        nodes.add(node);
        emit NodeBound(msg.sender, node, peerId);
    }

    /// @notice Ends a binding; the owner and the node key can each do it.
    function unbind(address node) external {
        address owner = _bindings[node].owner;
        if (owner == address(0)) revert NodeRegistryNotBound(node);
        if (msg.sender != owner && msg.sender != node) revert NodeRegistryNotAllowed(msg.sender);
        delete _bindings[node];
        _nodesOf[owner].remove(node);
        emit NodeUnbound(owner, node);
    }

    /// @notice The binding of a node key; its owner is zero if there is none.
    function bindingOf(address node) external view returns (Binding memory) {
        return _bindings[node];
    }

    function nodesOf(address owner) external view returns (address[] memory) {
        return _nodesOf[owner].values();
    }
}
