// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";

/// @title Stake of the contributors
/// @notice Each owner has an active and an unbonding amount. Both can be seized by the court, and only
/// by it, the unbonding one first. `frozen` is the sum of the amounts at risk in the owner's open cases; it may
/// exceed the stake, and whatever of the stake it covers cannot leave. Tokens leave in three ways only: to their
/// owner after the unbonding delay, to the sink, and at most 10 % of a seizure to the reporter.
/// @dev The token must be a plain ERC-20: no fee on transfer, no rebasing, no hooks.
contract StakeLedger {
    using SafeERC20 for IERC20;

    uint256 public constant MAX_REPORTER_CUT_BPS = 1_000;
    uint256 public constant MAX_UNBONDING_DELAY = 365 days;
    uint256 private constant BPS = 10_000;

    struct Account {
        uint128 active;
        uint128 unbonding;
        uint64 releaseAt;
        uint128 frozen;
    }

    IERC20 public immutable token;
    /// @notice The only contract that can freeze, release and seize.
    address public immutable court;
    /// @notice Receives what is seized, less the reporter's cut.
    address public immutable sink;
    uint256 public immutable unbondingDelay;
    /// @notice Active stake below which an owner's node has no standing. Read by peers, not enforced here.
    uint256 public immutable minStake;
    uint256 public immutable reporterCutBps;

    mapping(address owner => Account) private _accounts;

    event Staked(address indexed owner, uint256 amount);
    event UnbondRequested(address indexed owner, uint256 amount, uint256 releaseAt);
    event Rebonded(address indexed owner, uint256 amount);
    event Withdrawn(address indexed owner, uint256 amount);
    event StakeFrozen(address indexed owner, uint256 amount);
    event StakeReleased(address indexed owner, uint256 amount);
    event StakeSeized(address indexed owner, uint256 amount, address indexed reporter, uint256 cut);

    error StakeLedgerZeroAddress();
    error StakeLedgerInvalidDelay(uint256 delay);
    error StakeLedgerCutTooHigh(uint256 bps);
    error StakeLedgerZeroAmount();
    error StakeLedgerAmountTooLarge(uint256 amount);
    error StakeLedgerInsufficientStake(uint256 available, uint256 requested);
    error StakeLedgerNothingToWithdraw();
    error StakeLedgerStillUnbonding(uint256 releaseAt);
    error StakeLedgerFrozen(uint256 frozen);
    error StakeLedgerNotCourt(address caller);

    modifier onlyCourt() {
        if (msg.sender != court) revert StakeLedgerNotCourt(msg.sender);
        _;
    }

    constructor(
        IERC20 token_,
        address court_,
        address sink_,
        uint256 unbondingDelay_,
        uint256 minStake_,
        uint256 reporterCutBps_
    ) {
        if (address(token_) == address(0) || court_ == address(0) || sink_ == address(0)) {
            revert StakeLedgerZeroAddress();
        }
        if (unbondingDelay_ == 0 || unbondingDelay_ > MAX_UNBONDING_DELAY) {
            revert StakeLedgerInvalidDelay(unbondingDelay_);
        }
        if (reporterCutBps_ > MAX_REPORTER_CUT_BPS) revert StakeLedgerCutTooHigh(reporterCutBps_);
        token = token_;
        court = court_;
        sink = sink_;
        unbondingDelay = unbondingDelay_;
        minStake = minStake_;
        reporterCutBps = reporterCutBps_;
    }

    function accountOf(address owner) external view returns (Account memory) {
        return _accounts[owner];
    }

    /// @notice Adds to the caller's active stake; needs an allowance.
    function stake(uint256 amount) external {
        _stake(amount);
    }

    /// @notice `stake` with an ERC-2612 permit instead of an earlier approval.
    /// @dev A permit that somebody else already submitted is not an error as long as the allowance is there.
    function stakeWithPermit(uint256 amount, uint256 deadline, uint8 v, bytes32 r, bytes32 s) external {
        try IERC20Permit(address(token)).permit(msg.sender, address(this), amount, deadline, v, r, s) {} catch {}
        _stake(amount);
    }

    /// @notice Moves active stake to the unbonding bucket and restarts its clock.
    function requestUnbond(uint256 amount) external {
        Account storage account = _accounts[msg.sender];
        if (amount == 0) revert StakeLedgerZeroAmount();
        if (amount > account.active) revert StakeLedgerInsufficientStake(account.active, amount);
        uint256 releaseAt = block.timestamp + unbondingDelay;
        account.active -= uint128(amount);
        account.unbonding += uint128(amount);
        account.releaseAt = uint64(releaseAt);
        emit UnbondRequested(msg.sender, amount, releaseAt);
    }

    /// @notice Moves unbonding stake back to active. The clock of the rest goes on.
    function rebond(uint256 amount) external {
        Account storage account = _accounts[msg.sender];
        if (amount == 0) revert StakeLedgerZeroAmount();
        if (amount > account.unbonding) revert StakeLedgerInsufficientStake(account.unbonding, amount);
        account.unbonding -= uint128(amount);
        account.active += uint128(amount);
        emit Rebonded(msg.sender, amount);
    }

    /// @notice Pays out the caller's unbonding stake after the delay, less what open cases freeze.
    function withdraw() external returns (uint256 amount) {
        Account storage account = _accounts[msg.sender];
        uint256 unbonding = account.unbonding;
        if (unbonding == 0) revert StakeLedgerNothingToWithdraw();
        if (block.timestamp < account.releaseAt) revert StakeLedgerStillUnbonding(account.releaseAt);
        uint256 total = unbonding + account.active;
        uint256 frozen = account.frozen;
        if (frozen >= total) revert StakeLedgerFrozen(frozen);
        amount = total - frozen;
        if (amount > unbonding) amount = unbonding;
        account.unbonding = uint128(unbonding - amount);
        emit Withdrawn(msg.sender, amount);
        token.safeTransfer(msg.sender, amount);
    }

    /// @notice Puts an amount at risk; it may exceed the stake.
    function freeze(address owner, uint256 amount) external onlyCourt {
        if (amount > type(uint128).max) revert StakeLedgerAmountTooLarge(amount);
        _accounts[owner].frozen += uint128(amount);
        emit StakeFrozen(owner, amount);
    }

    /// @notice Ends the freeze of a dismissed case.
    function release(address owner, uint256 amount) external onlyCourt {
        _accounts[owner].frozen -= uint128(amount);
        emit StakeReleased(owner, amount);
    }

    /// @notice Ends the freeze of an upheld case and seizes, unbonding stake first.
    /// @dev Clips to what is there: nothing a staker does makes a verdict revert.
    /// @param frozenAmount What the case had frozen.
    /// @param amount What to seize at most.
    /// @return seized What was there to take.
    function seize(address owner, uint256 frozenAmount, uint256 amount, address reporter)
        external
        onlyCourt
        returns (uint256 seized)
    {
        Account storage account = _accounts[owner];
        account.frozen -= uint128(frozenAmount);
        uint256 unbonding = account.unbonding;
        uint256 active = account.active;
        uint256 fromUnbonding = amount < unbonding ? amount : unbonding;
        uint256 fromActive = amount - fromUnbonding;
        if (fromActive > active) fromActive = active;
        account.unbonding = uint128(unbonding - fromUnbonding);
        account.active = uint128(active - fromActive);
        seized = fromUnbonding + fromActive;
        uint256 cut = (seized * reporterCutBps) / BPS;
        emit StakeReleased(owner, frozenAmount);
        emit StakeSeized(owner, seized, reporter, cut);
        if (cut > 0) token.safeTransfer(reporter, cut);
        if (seized > cut) token.safeTransfer(sink, seized - cut);
    }

    function _stake(uint256 amount) private {
        if (amount == 0) revert StakeLedgerZeroAmount();
        if (amount > type(uint128).max) revert StakeLedgerAmountTooLarge(amount);
        _accounts[msg.sender].active += uint128(amount);
        emit Staked(msg.sender, amount);
        token.safeTransferFrom(msg.sender, address(this), amount);
    }
}
