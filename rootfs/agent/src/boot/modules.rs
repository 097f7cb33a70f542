//! Loads the modules that a modular kernel needs before anything else, in the order given by the
//! image: a path on each line, and parameters behind it if need be.

use crate::log::Log;
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use std::ffi::CString;
use std::fs::{self, File};

const LIST: &str = "/etc/cube/modules";

/// Loads what the list says, if there is one. What fails is told, and may not be needed.
pub fn load(log: Log) {
    for (path, parameters) in parse(&fs::read_to_string(LIST).unwrap_or_default()) {
        if let Err(error) = load_one(path, parameters) {
            log.error(format_args!("cannot load module '{path}': {error}"));
        }
    }
}

fn parse(list: &str) -> impl Iterator<Item = (&str, &str)> {
    let lines = list.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split_once(char::is_whitespace).unwrap_or((line, "")))
}

fn load_one(path: &str, parameters: &str) -> std::io::Result<()> {
    let file = File::open(path)?;
    let parameters = CString::new(parameters.trim())?;
    match finit_module(file, &parameters, ModuleInitFlags::empty()) {
        // Built in, or loaded by a device that appeared before.
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_paths_parameters_and_comments() {
        let list = "# vsock\n/lib/a.ko\n\n  /lib/b.ko  debug=1 x=2\n";
        let expected = [("/lib/a.ko", ""), ("/lib/b.ko", " debug=1 x=2")];
        assert_eq!(parse(list).collect::<Vec<_>>(), expected);
    }
}
