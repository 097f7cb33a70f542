//! Lines for people: on the guest's kernel log, and so on its console, or on stderr.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;

/// Where lines go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// The guest's kernel log.
    Kernel,
    /// Standard error, on a host.
    Stderr,
}

impl Log {
    /// Something that was wanted did not happen. Shown on a `quiet` console too.
    pub fn error(self, line: impl fmt::Display) {
        self.write('2', line);
    }

    /// A rare change of state.
    pub fn info(self, line: impl fmt::Display) {
        self.write('6', line);
    }

    fn write(self, level: char, line: impl fmt::Display) {
        if self == Self::Kernel {
            // One write is one line of the kernel log.
            let entry = format!("<{level}>cube-agent: {line}\n");
            let kmsg = OpenOptions::new().write(true).open("/dev/kmsg");
            if kmsg.and_then(|mut kmsg| kmsg.write_all(entry.as_bytes())).is_ok() {
                return;
            }
        }
        // Whoever closed stderr does not want to know.
        let _ = writeln!(std::io::stderr(), "cube-agent: {line}");
    }
}
