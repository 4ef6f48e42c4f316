// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";
import {ValidatorSet} from "./ValidatorSet.sol";

/// @title Policy versions and the work done for them
/// @notice Per run, the publisher records the hash of each policy version before anybody works for it; the hash
/// of the block it lands in seeds the assignment of work. Per version, a quorum of validators commits to the
/// judged work: a Merkle root, and the hash of the file behind it.
/// @dev A run is opened once, by the coordinator of this deployment, so no stranger can take a run's name. Opening
/// fixes the publisher for ever and moves no tokens; the coordinator has no other power here.
contract WorkLedger is EIP712 {
    uint256 public constant MAX_ENTRIES = 64;
    uint256 public constant MAX_VOID_WINDOW = 365 days;

    bytes32 public constant WORK_ENTRY_TYPEHASH = keccak256(
        "WorkEntry(uint64 version,uint32 revision,bytes32 root,bytes32 dataHash,uint32 accepted,uint32 rejected,uint64 units)"
    );
    bytes32 public constant WORK_COMMIT_TYPEHASH = keccak256(
        "WorkCommit(bytes32 runId,uint256 setId,WorkEntry[] entries)WorkEntry(uint64 version,uint32 revision,bytes32 root,bytes32 dataHash,uint32 accepted,uint32 rejected,uint64 units)"
    );
    bytes32 public constant WORK_VOID_TYPEHASH =
        keccak256("WorkVoid(bytes32 runId,uint256 setId,uint64 version,uint32 revision)");

    struct Run {
        address publisher;
        bool hasVersions;
        uint64 latestVersion;
    }

    struct Checkpoint {
        bytes32 checkpointHash;
        uint64 blockNumber;
        uint64 recordedAt;
    }

    /// @param revision 0 for the first commitment of a version, one more after each void.
    /// @param root Merkle root over the leaves of `leafOf`.
    /// @param dataHash SHA-256 of the work file that holds the leaves.
    /// @param accepted Submissions accepted, of those in the file.
    /// @param units Units of credit over the accepted ones.
    struct WorkEntry {
        uint64 version;
        uint32 revision;
        bytes32 root;
        bytes32 dataHash;
        uint32 accepted;
        uint32 rejected;
        uint64 units;
    }

    /// @param revision Revision that is committed or, if none is, the next one to commit.
    /// @param committedAt 0 if nothing is committed.
    struct Work {
        bytes32 root;
        bytes32 dataHash;
        uint32 accepted;
        uint32 rejected;
        uint64 units;
        uint32 revision;
        uint64 committedAt;
    }

    struct Leaf {
        uint64 version;
        uint32 index;
        address node;
        bytes32 workHash;
        bool accepted;
        uint64 units;
    }

    ValidatorSet public immutable validatorSet;
    /// @notice The key that opens runs.
    address public immutable coordinator;
    /// @notice Seconds in which a quorum can void what it committed.
    uint256 public immutable voidWindow;

    mapping(bytes32 runId => Run) private _runs;
    mapping(bytes32 runId => mapping(uint64 version => Checkpoint)) private _checkpoints;
    mapping(bytes32 runId => mapping(uint64 version => Work)) private _works;

    event RunOpened(bytes32 indexed runId, address indexed publisher);
    event CheckpointRecorded(bytes32 indexed runId, uint64 indexed version, bytes32 checkpointHash);
    event WorkCommitted(
        bytes32 indexed runId,
        uint64 indexed version,
        uint32 revision,
        bytes32 root,
        bytes32 dataHash,
        uint32 accepted,
        uint32 rejected,
        uint64 units
    );
    event WorkVoided(bytes32 indexed runId, uint64 indexed version, uint32 revision);

    error WorkLedgerZeroAddress();
    error WorkLedgerInvalidWindow(uint256 window);
    error WorkLedgerNotCoordinator(address caller);
    error WorkLedgerRunAlreadyOpen(bytes32 runId);
    error WorkLedgerUnknownRun(bytes32 runId);
    error WorkLedgerNotPublisher(address caller);
    error WorkLedgerZeroHash();
    error WorkLedgerAlreadyRecorded(uint64 version);
    /// @dev Versions ascend; they may skip numbers, and a skipped one stays empty.
    error WorkLedgerVersionNotAscending(uint64 version, uint64 latest);
    error WorkLedgerUnknownVersion(uint64 version);
    error WorkLedgerInvalidEntries(uint256 entries);
    error WorkLedgerAlreadyCommitted(uint64 version);
    error WorkLedgerWrongRevision(uint64 version, uint32 expected);
    error WorkLedgerNotCommitted(uint64 version);
    error WorkLedgerVoidWindowOver(uint64 version);

    constructor(ValidatorSet validatorSet_, address coordinator_, uint256 voidWindow_)
        EIP712("Intellect WorkLedger", "1")
    {
        if (address(validatorSet_) == address(0) || coordinator_ == address(0)) revert WorkLedgerZeroAddress();
        if (voidWindow_ > MAX_VOID_WINDOW) revert WorkLedgerInvalidWindow(voidWindow_);
        validatorSet = validatorSet_;
        coordinator = coordinator_;
        voidWindow = voidWindow_;
    }

    /// @notice Opens a run and fixes its publisher; the first write wins.
    function openRun(bytes32 runId, address publisher) external {
        if (msg.sender != coordinator) revert WorkLedgerNotCoordinator(msg.sender);
        if (publisher == address(0)) revert WorkLedgerZeroAddress();
        if (_runs[runId].publisher != address(0)) revert WorkLedgerRunAlreadyOpen(runId);
        _runs[runId].publisher = publisher;
        emit RunOpened(runId, publisher);
    }

    /// @notice Records the checkpoint hash of a version; the first write wins.
    function record(bytes32 runId, uint64 version, bytes32 checkpointHash) external {
        Run storage run = _runs[runId];
        if (run.publisher == address(0)) revert WorkLedgerUnknownRun(runId);
        if (msg.sender != run.publisher) revert WorkLedgerNotPublisher(msg.sender);
        if (checkpointHash == bytes32(0)) revert WorkLedgerZeroHash();
        if (_checkpoints[runId][version].checkpointHash != bytes32(0)) revert WorkLedgerAlreadyRecorded(version);
        if (run.hasVersions && version < run.latestVersion) {
            revert WorkLedgerVersionNotAscending(version, run.latestVersion);
        }
        run.hasVersions = true;
        run.latestVersion = version;
        _checkpoints[runId][version] = Checkpoint(checkpointHash, uint64(block.number), uint64(block.timestamp));
        emit CheckpointRecorded(runId, version, checkpointHash);
    }

    /// @notice Commits to the work of one or several versions.
    /// @param signatures A quorum of the set in force over WorkCommit, ascending by signer.
    function commit(bytes32 runId, WorkEntry[] calldata entries, bytes[] calldata signatures) external {
        if (_runs[runId].publisher == address(0)) revert WorkLedgerUnknownRun(runId);
        if (entries.length == 0 || entries.length > MAX_ENTRIES) revert WorkLedgerInvalidEntries(entries.length);
        bytes32[] memory hashes = new bytes32[](entries.length);
        for (uint256 i = 0; i < entries.length; ++i) {
            WorkEntry calldata entry = entries[i];
            hashes[i] = keccak256(
                abi.encode(
                    WORK_ENTRY_TYPEHASH,
                    entry.version,
                    entry.revision,
                    entry.root,
                    entry.dataHash,
                    entry.accepted,
                    entry.rejected,
                    entry.units
                )
            );
            _store(runId, entry);
        }
        uint256 setId = validatorSet.activeSetId();
        bytes32 digest = _hashTypedDataV4(
            keccak256(abi.encode(WORK_COMMIT_TYPEHASH, runId, setId, keccak256(abi.encodePacked(hashes))))
        );
        validatorSet.requireQuorum(setId, digest, signatures, address(0));
    }

    /// @notice Voids a commitment within its window, so that a corrected one can follow.
    /// @param signatures A quorum of the set in force over WorkVoid, ascending by signer.
    function voidWork(bytes32 runId, uint64 version, uint32 revision, bytes[] calldata signatures) external {
        Work storage work = _works[runId][version];
        if (work.committedAt == 0) revert WorkLedgerNotCommitted(version);
        if (work.revision != revision) revert WorkLedgerWrongRevision(version, work.revision);
        if (block.timestamp > work.committedAt + voidWindow) revert WorkLedgerVoidWindowOver(version);
        uint256 setId = validatorSet.activeSetId();
        bytes32 digest =
            _hashTypedDataV4(keccak256(abi.encode(WORK_VOID_TYPEHASH, runId, setId, version, revision)));
        validatorSet.requireQuorum(setId, digest, signatures, address(0));
        delete _works[runId][version];
        work.revision = revision + 1;
        emit WorkVoided(runId, version, revision);
    }

    function runOf(bytes32 runId) external view returns (Run memory) {
        return _runs[runId];
    }

    /// @notice The recorded checkpoint; its hash is zero if there is none.
    function checkpointOf(bytes32 runId, uint64 version) external view returns (Checkpoint memory) {
        return _checkpoints[runId][version];
    }

    function workOf(bytes32 runId, uint64 version) external view returns (Work memory) {
        return _works[runId][version];
    }

    /// @notice Hash of one judged submission. Hashed twice, so that an inner node never passes as a leaf.
    function leafOf(bytes32 runId, Leaf calldata leaf) public pure returns (bytes32) {
        return keccak256(
            bytes.concat(
                keccak256(
                    abi.encode(
                        runId, leaf.version, leaf.index, leaf.node, leaf.workHash, leaf.accepted, leaf.units
                    )
                )
            )
        );
    }

    /// @notice Whether a judged submission is part of the committed work of its version.
    function verifyWork(bytes32 runId, Leaf calldata leaf, bytes32[] calldata proof) external view returns (bool) {
        Work storage work = _works[runId][leaf.version];
        return work.committedAt != 0 && MerkleProof.verifyCalldata(proof, work.root, leafOf(runId, leaf));
    }

    function _store(bytes32 runId, WorkEntry calldata entry) private {
        if (_checkpoints[runId][entry.version].checkpointHash == bytes32(0)) {
            revert WorkLedgerUnknownVersion(entry.version);
        }
        Work storage work = _works[runId][entry.version];
        if (work.committedAt != 0) revert WorkLedgerAlreadyCommitted(entry.version);
        if (work.revision != entry.revision) revert WorkLedgerWrongRevision(entry.version, work.revision);
        work.root = entry.root;
        work.dataHash = entry.dataHash;
        work.accepted = entry.accepted;
        work.rejected = entry.rejected;
        work.units = entry.units;
        work.committedAt = uint64(block.timestamp);
        emit WorkCommitted(
            runId,
            entry.version,
            entry.revision,
            entry.root,
            entry.dataHash,
            entry.accepted,
            entry.rejected,
            entry.units
        );
    }
}
