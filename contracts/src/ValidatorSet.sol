// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";

/// @title The validators of a deployment, as a sequence of sets
/// @notice A set has between 2 and 64 members and a threshold of more than half of them, so that no
/// single key is ever a quorum. Sets are numbered from 1, never change once made, and hold from a time.
/// The quorum of the set in force appoints the next one, which takes office after an immutable delay:
/// whoever does not trust it can take the stake out before. Nobody else can change anything here.
contract ValidatorSet is EIP712 {
    uint256 public constant MIN_MEMBERS = 2;
    uint256 public constant MAX_MEMBERS = 64;
    uint256 public constant MAX_CHANGE_DELAY = 365 days;

    bytes32 public constant SET_CHANGE_TYPEHASH = keccak256("SetChange(uint256 setId,address[] members)");

    /// @notice Seconds between the appointment of a set and its taking office.
    uint256 public immutable changeDelay;

    /// @notice Number of sets ever made, the pending one included.
    uint256 public setCount;

    mapping(uint256 setId => address[]) private _members;
    mapping(uint256 setId => mapping(address account => bool)) private _isMember;
    mapping(uint256 setId => uint256) private _activeFrom;

    event SetAppointed(uint256 indexed setId, address[] members, uint256 threshold, uint256 activeFrom);

    error ValidatorSetInvalidDelay(uint256 delay);
    error ValidatorSetInvalidSize(uint256 members);
    /// @dev Members are given in strictly ascending order, which also rules out the zero address and doubles.
    error ValidatorSetMembersNotAscending(address member);
    error ValidatorSetUnknownSet(uint256 setId);
    error ValidatorSetChangePending(uint256 setId);
    error ValidatorSetBelowThreshold(uint256 signatures, uint256 threshold);
    error ValidatorSetNotAMember(uint256 setId, address signer);
    /// @dev Signatures are given in strictly ascending order of signer, so that none counts twice.
    error ValidatorSetSignersNotAscending(address signer);
    error ValidatorSetExcludedSigner(address signer);

    /// @param members First set, in force at once; strictly ascending.
    /// @param changeDelay_ Seconds before a later set takes office.
    constructor(address[] memory members, uint256 changeDelay_) EIP712("Intellect ValidatorSet", "1") {
        if (changeDelay_ == 0 || changeDelay_ > MAX_CHANGE_DELAY) revert ValidatorSetInvalidDelay(changeDelay_);
        changeDelay = changeDelay_;
        _appoint(members, block.timestamp);
    }

    /// @notice Appoints the next set with the signatures of a quorum of the set in force.
    /// Only one change can be pending at a time.
    /// @param members The next set, strictly ascending.
    /// @param signatures EIP-712 signatures over SetChange(next id, members), ascending by signer.
    function appoint(address[] calldata members, bytes[] calldata signatures) external returns (uint256 setId) {
        setId = setCount + 1;
        if (_activeFrom[setCount] > block.timestamp) revert ValidatorSetChangePending(setCount);
        bytes32 digest = _hashTypedDataV4(
            keccak256(abi.encode(SET_CHANGE_TYPEHASH, setId, keccak256(abi.encodePacked(members))))
        );
        requireQuorum(setCount, digest, signatures, address(0));
        _appoint(members, block.timestamp + changeDelay);
    }

    /// @notice The set in force now.
    function activeSetId() public view returns (uint256) {
        return _activeFrom[setCount] > block.timestamp ? setCount - 1 : setCount;
    }

    function membersOf(uint256 setId) external view returns (address[] memory) {
        return _members[setId];
    }

    function isMember(uint256 setId, address account) external view returns (bool) {
        return _isMember[setId][account];
    }

    /// @notice Time from which the set holds; 0 if there is no such set.
    function activeFrom(uint256 setId) external view returns (uint256) {
        return _activeFrom[setId];
    }

    /// @notice Signatures that make a quorum: more than half of the members.
    function thresholdOf(uint256 setId) public view returns (uint256) {
        uint256 size = _members[setId].length;
        if (size == 0) revert ValidatorSetUnknownSet(setId);
        return size / 2 + 1;
    }

    /// @notice Reverts unless a quorum of the set signed the digest.
    /// @param digest EIP-712 digest under the calling contract's own domain.
    /// @param signatures 65 bytes each, strictly ascending by signer, every one valid; high s is refused.
    /// @param excluded A member that has no vote on this, or zero. It does not lower the threshold.
    function requireQuorum(uint256 setId, bytes32 digest, bytes[] calldata signatures, address excluded)
        public
        view
    {
        uint256 threshold = thresholdOf(setId);
        if (signatures.length < threshold) revert ValidatorSetBelowThreshold(signatures.length, threshold);
        address previous = address(0);
        for (uint256 i = 0; i < signatures.length; ++i) {
            address signer = ECDSA.recover(digest, signatures[i]);
            if (signer <= previous) revert ValidatorSetSignersNotAscending(signer);
            if (signer == excluded) revert ValidatorSetExcludedSigner(signer);
            if (!_isMember[setId][signer]) revert ValidatorSetNotAMember(setId, signer);
            previous = signer;
        }
    }

    function _appoint(address[] memory members, uint256 from) private {
        uint256 size = members.length;
        if (size < MIN_MEMBERS || size > MAX_MEMBERS) revert ValidatorSetInvalidSize(size);
        uint256 setId = ++setCount;
        address previous = address(0);
        for (uint256 i = 0; i < size; ++i) {
            address member = members[i];
            if (member <= previous) revert ValidatorSetMembersNotAscending(member);
            _isMember[setId][member] = true;
            previous = member;
        }
        _members[setId] = members;
        _activeFrom[setId] = from;
        emit SetAppointed(setId, members, size / 2 + 1, from);
    }
}
