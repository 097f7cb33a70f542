//! Many small files: how they are laid out, and what a guest does with them.
//!
//! The guest's part is the measuring program itself, started there with [`ARGUMENT`]: starting
//! programs one by one would take longer than what they are to do.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, bail, ensure};

use crate::guests::command;

/// The argument that makes the measuring program be the guest's part.
pub const ARGUMENT: &str = "--in-guest";

/// Files in one directory.
const PER_DIRECTORY: usize = 100;

/// The file with this number, below the tree's root.
fn name(number: usize) -> PathBuf {
    format!("d{}/f{number}", number / PER_DIRECTORY).into()
}

/// How many bytes it has: up to 8 KiB, 2 on average.
fn len(number: usize) -> usize {
    [0, 100, 500, 1_000, 1_700, 2_500, 3_500, 8_192][number % 8]
}

/// Makes `files` small files in the directory `tree`, and `archive` with all of them.
pub fn prepare(tree: &Path, archive: &Path, files: usize) -> anyhow::Result<()> {
    let content = vec![b'x'; 8192];
    for number in 0..files {
        let path = tree.join(name(number));
        if number % PER_DIRECTORY == 0 {
            fs::create_dir_all(path.parent().unwrap_or(tree))?;
        }
        let written = fs::write(&path, content.get(..len(number)).unwrap_or_default());
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    let [tree, archive] = [tree, archive].map(|path| path.display().to_string());
    command("tar", &["-C", &tree, "-cf", &archive, "."])
}

/// Does what the arguments say, and prints how long it has taken, in nanoseconds.
pub fn be_in_guest(arguments: &[String]) -> anyhow::Result<()> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let took = match *arguments.as_slice() {
        ["stat", tree, files] => stat(tree.as_ref(), files.parse()?)?,
        ["unpack", archive, to] => unpack(archive, to)?,
        _ => bail!("no such work: {arguments:?}"),
    };
    println!("{took}");
    Ok(())
}

/// Asks for the attributes of each file, by its name.
fn stat(tree: &Path, files: usize) -> anyhow::Result<u128> {
    let started = Instant::now();
    for number in 0..files {
        let path = tree.join(name(number));
        let found = fs::metadata(&path).with_context(|| format!("{}", path.display()))?.len();
        ensure!(found == len(number) as u64, "{} has {found} bytes", path.display());
    }
    Ok(started.elapsed().as_nanos())
}

/// Unpacks an archive into a new directory.
fn unpack(archive: &str, to: &str) -> anyhow::Result<u128> {
    fs::create_dir(to).with_context(|| to.to_owned())?;
    let started = Instant::now();
    let status = Command::new("tar").args(["-xf", archive, "-C", to]).status()?;
    ensure!(status.success(), "tar: {status}");
    Ok(started.elapsed().as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_what_is_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let files = 2 * PER_DIRECTORY + 1;
        prepare(&path("tree"), &path("tar"), files).unwrap();
        let copy = path("copy");
        unpack(path("tar").to_str().unwrap(), copy.to_str().unwrap()).unwrap();
        assert!(stat(&copy, files).unwrap() > 0);
        assert!(stat(&copy, files + 1).unwrap_err().to_string().ends_with("d2/f201"));
        fs::write(copy.join("d0/f7"), "other").unwrap();
        assert!(stat(&copy, files).unwrap_err().to_string().ends_with("f7 has 5 bytes"));
    }

    #[test]
    fn work_that_is_none_is_refused() {
        let words = ["stat".to_owned(), "/".to_owned()];
        assert!(be_in_guest(&words).unwrap_err().to_string().contains("no such work"));
    }
}
