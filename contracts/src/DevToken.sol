// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import {ERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Permit.sol";

/// @title Token for development chains
/// @notice Its deployer mints at will. Stake a real token on a real chain.
contract DevToken is ERC20, ERC20Permit {
    address public immutable minter;

    error DevTokenNotMinter(address caller);

    constructor() ERC20("Intellect Development Token", "DEV") ERC20Permit("Intellect Development Token") {
        minter = msg.sender;
    }

    function mint(address to, uint256 amount) external {
        if (msg.sender != minter) revert DevTokenNotMinter(msg.sender);
        _mint(to, amount);
    }
}
