#!/usr/bin/env node
// Starts the binary of the package for this system, and hands signals and the exit status through.
'use strict';
const { spawn } = require('child_process');
const { constants } = require('os');

const system = `${process.platform}-${process.arch}`;
let binary;
try {
  binary = require.resolve(`@kiln-llm/${system}/bin/kiln`);
} catch {
  console.error(
    ['linux-x64', 'linux-arm64'].includes(system)
      ? `error: the package @kiln-llm/${system} is not installed\n` +
          'hint: install kiln-llm again without --no-optional (--omit=optional); it needs glibc, so not Alpine'
      : `error: kiln-llm has no binary for ${system}, only for linux-x64 and linux-arm64\nhint: build Kiln from source`
  );
  process.exit(1);
}

const child = spawn(binary, process.argv.slice(2), { stdio: 'inherit' });
// Ctrl-C reaches the whole group: the binary ends by it, and this script waits for that.
process.on('SIGINT', () => {});
for (const signal of ['SIGTERM', 'SIGHUP', 'SIGQUIT']) process.on(signal, () => child.kill(signal));
child.on('error', (why) => {
  console.error(`error: ${binary} does not start: ${why.message}`);
  process.exit(1);
});
child.on('exit', (code, signal) => process.exit(signal ? 128 + constants.signals[signal] : code));
