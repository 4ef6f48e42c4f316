// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {ReentrancyGuardTransient} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {IBarred} from "./NodeRegistry.sol";
import {StakeLedger} from "./StakeLedger.sol";
import {ValidatorSet} from "./ValidatorSet.sol";

/// @title Cases against stakers
/// @notice Anybody opens a case against a bond; the amount at risk is frozen at once. The accused may appeal
/// within the window. A quorum of the validators in office at the opening decides, the reporter having no vote: to
/// dismiss at any time, to uphold only after the window or an appeal. Silence until `decideBy` dismisses. The bond
/// goes back to the reporter if the case is upheld, and to the accused if it is not. Cases do not depend on each
/// other: several may be open against one owner, and each seizes what is there when it is upheld.
contract SlashCourt is EIP712, ReentrancyGuardTransient, IBarred {
    using SafeERC20 for IERC20;

    /// @dev Fraud: work that a replay of the evidence shows to be forged. Equivocation: two signed answers for one
    /// unit. An upheld fraud bars the owner from binding nodes.
    enum Offence {
        Fraud,
        Equivocation
    }

    enum Status {
        None,
        Open,
        Appealed,
        Upheld,
        Dismissed,
        Expired
    }

    /// @param amount At risk, after the cap of the offence.
    /// @param windowEndsAt Last second in which the accused can appeal.
    /// @param decideBy Last second in which a quorum can decide.
    /// @param setId Validator set that decides: the one in force at the opening.
    /// @param seized What an upheld case took.
    struct Case {
        address accused;
        uint48 openedAt;
        Offence offence;
        Status status;
        address node;
        uint48 windowEndsAt;
        address reporter;
        uint48 decideBy;
        uint128 amount;
        uint128 bond;
        uint128 seized;
        uint64 setId;
        bytes32 evidenceHash;
        bytes32 defenceHash;
    }

    struct Parameters {
        uint256 window;
        uint256 voting;
        uint256 bond;
        uint256 fraudCap;
        uint256 equivocationCap;
        uint256 accountCap;
        uint256 capPeriod;
    }

    bytes32 public constant DECISION_TYPEHASH = keccak256(
        "Decision(uint256 caseId,uint256 setId,address accused,address node,uint8 offence,uint256 amount,bytes32 evidenceHash,bytes32 defenceHash,bool uphold)"
    );
    uint256 public constant MAX_CASES_PER_READ = 256;

    StakeLedger public immutable stakeLedger;
    ValidatorSet public immutable validatorSet;
    IERC20 public immutable token;
    /// @notice Seconds the accused has to appeal.
    uint256 public immutable window;
    /// @notice Seconds the validators have after the window.
    uint256 public immutable voting;
    /// @notice Tokens a reporter puts down.
    uint256 public immutable bond;
    /// @notice Largest amount one case of fraud can put at risk.
    uint256 public immutable fraudCap;
    /// @notice Largest amount one case of equivocation can put at risk.
    uint256 public immutable equivocationCap;
    /// @notice Most that cases opened in one period can seize from one owner.
    uint256 public immutable accountCap;
    /// @notice Length of such a period, in seconds.
    uint256 public immutable capPeriod;

    /// @notice Number of cases ever opened; ids start at 1.
    uint256 public caseCount;

    mapping(uint256 caseId => Case) private _cases;
    mapping(address owner => bool) public isBarred;
    mapping(address owner => mapping(uint256 period => uint256)) private _seizedInPeriod;

    event CaseOpened(
        uint256 indexed caseId,
        address indexed accused,
        address indexed reporter,
        address node,
        Offence offence,
        uint256 amount,
        bytes32 evidenceHash
    );
    event CaseAppealed(uint256 indexed caseId, bytes32 defenceHash);
    event CaseUpheld(uint256 indexed caseId, address indexed accused, uint256 seized);
    event CaseDismissed(uint256 indexed caseId, address indexed accused, uint256 bond);
    event CaseExpired(uint256 indexed caseId, address indexed accused, uint256 bond);
    event OwnerBarred(address indexed owner, uint256 indexed caseId);

    error SlashCourtInvalidParameters();
    error SlashCourtNotTheCourtOf(address stakeLedger);
    /// @dev A case must end before stake that was active at its opening can leave.
    error SlashCourtCaseOutlastsUnbonding(uint256 caseTime, uint256 unbondingDelay);
    /// @dev A case must end before the next validator set takes office.
    error SlashCourtCaseOutlastsSetChange(uint256 caseTime, uint256 changeDelay);
    error SlashCourtInvalidAccused();
    error SlashCourtZeroAmount();
    error SlashCourtZeroHash();
    error SlashCourtUnknownCase(uint256 caseId);
    error SlashCourtCaseClosed(uint256 caseId);
    error SlashCourtNotAccused(address caller);
    error SlashCourtAlreadyAppealed(uint256 caseId);
    error SlashCourtWindowOver(uint256 windowEndsAt);
    error SlashCourtWindowOpen(uint256 windowEndsAt);
    error SlashCourtVotingOver(uint256 decideBy);
    error SlashCourtVotingOpen(uint256 decideBy);

    constructor(StakeLedger stakeLedger_, ValidatorSet validatorSet_, Parameters memory parameters)
        EIP712("Intellect SlashCourt", "1")
    {
        if (stakeLedger_.court() != address(this)) revert SlashCourtNotTheCourtOf(address(stakeLedger_));
        if (
            parameters.window == 0 || parameters.voting == 0 || parameters.fraudCap == 0
                || parameters.equivocationCap == 0 || parameters.accountCap == 0 || parameters.capPeriod == 0
                || parameters.bond > type(uint128).max || parameters.fraudCap > type(uint96).max
                || parameters.equivocationCap > type(uint96).max
        ) revert SlashCourtInvalidParameters();
        uint256 caseTime = parameters.window + parameters.voting;
        if (caseTime >= stakeLedger_.unbondingDelay()) {
            revert SlashCourtCaseOutlastsUnbonding(caseTime, stakeLedger_.unbondingDelay());
        }
        if (caseTime >= validatorSet_.changeDelay()) {
            revert SlashCourtCaseOutlastsSetChange(caseTime, validatorSet_.changeDelay());
        }
        stakeLedger = stakeLedger_;
        validatorSet = validatorSet_;
        token = stakeLedger_.token();
        window = parameters.window;
        voting = parameters.voting;
        bond = parameters.bond;
        fraudCap = parameters.fraudCap;
        equivocationCap = parameters.equivocationCap;
        accountCap = parameters.accountCap;
        capPeriod = parameters.capPeriod;
    }

    /// @notice Opens a case, takes the bond and freezes the amount.
    /// @param accused Owner whose stake is at risk.
    /// @param node Node key that signed the evidence; validators check that it was the owner's.
    /// @param amount Clipped to the cap of the offence.
    /// @param evidenceHash SHA-256 of the evidence bundle.
    function open(address accused, address node, uint256 amount, Offence offence, bytes32 evidenceHash)
        external
        nonReentrant
        returns (uint256 caseId)
    {
        if (accused == address(0) || accused == address(stakeLedger) || accused == address(this)) {
            revert SlashCourtInvalidAccused();
        }
        if (amount == 0) revert SlashCourtZeroAmount();
        if (evidenceHash == bytes32(0)) revert SlashCourtZeroHash();
        uint256 cap = offence == Offence.Fraud ? fraudCap : equivocationCap;
        if (amount > cap) amount = cap;
        caseId = ++caseCount;
        Case storage c = _cases[caseId];
        c.accused = accused;
        c.openedAt = uint48(block.timestamp);
        c.offence = offence;
        c.status = Status.Open;
        c.node = node;
        c.windowEndsAt = uint48(block.timestamp + window);
        c.reporter = msg.sender;
        c.decideBy = uint48(block.timestamp + window + voting);
        c.amount = uint128(amount);
        c.bond = uint128(bond);
        c.setId = uint64(validatorSet.activeSetId());
        c.evidenceHash = evidenceHash;
        emit CaseOpened(caseId, accused, msg.sender, node, offence, amount, evidenceHash);
        stakeLedger.freeze(accused, amount);
        if (bond > 0) token.safeTransferFrom(msg.sender, address(this), bond);
    }

    /// @notice Answers the accusation, once. Verdicts signed before it no longer count.
    /// @param defenceHash SHA-256 of the accused's defence.
    function appeal(uint256 caseId, bytes32 defenceHash) external {
        Case storage c = _ongoing(caseId);
        if (msg.sender != c.accused) revert SlashCourtNotAccused(msg.sender);
        if (c.status == Status.Appealed) revert SlashCourtAlreadyAppealed(caseId);
        if (block.timestamp > c.windowEndsAt) revert SlashCourtWindowOver(c.windowEndsAt);
        if (defenceHash == bytes32(0)) revert SlashCourtZeroHash();
        c.status = Status.Appealed;
        c.defenceHash = defenceHash;
        emit CaseAppealed(caseId, defenceHash);
    }

    /// @notice Ends a case with the verdict a quorum signed. Anybody may send it.
    /// @param signatures A quorum of the case's validator set over Decision, ascending by signer, none the reporter's.
    function decide(uint256 caseId, bool uphold, bytes[] calldata signatures) external nonReentrant {
        Case storage c = _ongoing(caseId);
        if (block.timestamp > c.decideBy) revert SlashCourtVotingOver(c.decideBy);
        if (uphold && c.status != Status.Appealed && block.timestamp <= c.windowEndsAt) {
            revert SlashCourtWindowOpen(c.windowEndsAt);
        }
        validatorSet.requireQuorum(c.setId, _decisionDigest(caseId, c, uphold), signatures, c.reporter);
        if (uphold) _uphold(caseId, c);
        else _clear(caseId, c, Status.Dismissed);
    }

    /// @notice Dismisses a case that nobody decided in time. Anybody may send it.
    function expire(uint256 caseId) external nonReentrant {
        Case storage c = _ongoing(caseId);
        if (block.timestamp <= c.decideBy) revert SlashCourtVotingOpen(c.decideBy);
        _clear(caseId, c, Status.Expired);
    }

    function caseOf(uint256 caseId) external view returns (Case memory) {
        if (_cases[caseId].status == Status.None) revert SlashCourtUnknownCase(caseId);
        return _cases[caseId];
    }

    /// @notice Up to 256 cases from the given id on.
    function casesFrom(uint256 firstId, uint256 count) external view returns (Case[] memory cases) {
        if (count > MAX_CASES_PER_READ) count = MAX_CASES_PER_READ;
        uint256 available = firstId == 0 || firstId > caseCount ? 0 : caseCount - firstId + 1;
        if (count > available) count = available;
        cases = new Case[](count);
        for (uint256 i = 0; i < count; ++i) cases[i] = _cases[firstId + i];
    }

    /// @notice The EIP-712 digest a validator signs for a verdict on the case as it stands now.
    function decisionDigest(uint256 caseId, bool uphold) external view returns (bytes32) {
        return _decisionDigest(caseId, _ongoing(caseId), uphold);
    }

    function _uphold(uint256 caseId, Case storage c) private {
        c.status = Status.Upheld;
        // Counted by the period of the opening, so that the order of verdicts does not matter.
        uint256 period = c.openedAt / capPeriod;
        uint256 room = accountCap - _seizedInPeriod[c.accused][period];
        uint256 amount = c.amount < room ? c.amount : room;
        if (c.offence == Offence.Fraud && !isBarred[c.accused]) {
            isBarred[c.accused] = true;
            emit OwnerBarred(c.accused, caseId);
        }
        uint256 seized = stakeLedger.seize(c.accused, c.amount, amount, c.reporter);
        _seizedInPeriod[c.accused][period] += seized;
        c.seized = uint128(seized);
        emit CaseUpheld(caseId, c.accused, seized);
        if (c.bond > 0) token.safeTransfer(c.reporter, c.bond);
    }

    function _clear(uint256 caseId, Case storage c, Status status) private {
        c.status = status;
        if (status == Status.Dismissed) emit CaseDismissed(caseId, c.accused, c.bond);
        else emit CaseExpired(caseId, c.accused, c.bond);
        stakeLedger.release(c.accused, c.amount);
        if (c.bond > 0) token.safeTransfer(c.accused, c.bond);
    }

    function _ongoing(uint256 caseId) private view returns (Case storage c) {
        c = _cases[caseId];
        if (c.status == Status.None) revert SlashCourtUnknownCase(caseId);
        if (c.status != Status.Open && c.status != Status.Appealed) revert SlashCourtCaseClosed(caseId);
    }

    function _decisionDigest(uint256 caseId, Case storage c, bool uphold) private view returns (bytes32) {
        return _hashTypedDataV4(
            keccak256(
                abi.encode(
                    DECISION_TYPEHASH,
                    caseId,
                    uint256(c.setId),
                    c.accused,
                    c.node,
                    uint8(c.offence),
                    uint256(c.amount),
                    c.evidenceHash,
                    c.defenceHash,
                    uphold
                )
            )
        );
    }
}
