// Compiles src/*.sol with solc-js and writes ABI, bytecode and sources to one JSON file, reproducibly.
// Usage: node compile.mjs [OUTPUT]   (default: the artefact that ships in the Python package)
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const require = createRequire(import.meta.url);
const solc = require("solc");
const root = dirname(fileURLToPath(import.meta.url));
const output = process.argv[2] ?? join(root, "../protocol/intellect_protocol/ledger/contracts.json");

const settings = {
  evmVersion: "cancun",
  optimizer: { enabled: true, runs: 200 },
  metadata: { bytecodeHash: "none", appendCBOR: false },
  outputSelection: { "*": { "*": ["abi", "evm.bytecode.object"] } },
};
const names = readdirSync(join(root, "src")).filter((name) => name.endsWith(".sol")).sort();
const sources = Object.fromEntries(
  names.map((name) => [`src/${name}`, { content: readFileSync(join(root, "src", name), "utf8") }]),
);
const findImport = (path) => {
  try {
    return { contents: readFileSync(join(root, "node_modules", path), "utf8") };
  } catch (error) {
    return { error: String(error) };
  }
};
const input = { language: "Solidity", sources, settings };
const result = JSON.parse(solc.compile(JSON.stringify(input), { import: findImport }));

// Warnings about our own files count as errors; those about a dependency are its own business.
const problems = (result.errors ?? []).filter(
  ({ severity, sourceLocation }) => severity === "error" || (sourceLocation?.file ?? "").startsWith("src/"),
);
for (const problem of problems) console.error(problem.formattedMessage);
if (problems.length > 0) process.exit(1);

const contracts = {};
for (const name of names.map((name) => name.replace(/\.sol$/, ""))) {
  const { abi, evm } = result.contracts[`src/${name}.sol`][name];
  contracts[name] = { abi, bytecode: `0x${evm.bytecode.object}` };
}
const { outputSelection, ...kept } = settings;
const texts = Object.fromEntries(Object.entries(sources).map(([path, { content }]) => [path, content]));
const artefact = { compiler: solc.version(), settings: kept, contracts, sources: texts };
writeFileSync(output, JSON.stringify(artefact, null, 1) + "\n");
