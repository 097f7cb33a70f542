use std::io::Write;

use tempfile::{NamedTempFile, TempDir};

use super::*;

fn image(size: u64) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(size).unwrap();
    file
}

fn refusal(path: &Path, read_only: bool) -> DiskError {
    DiskFile::open(path, read_only).err().unwrap()
}

#[test]
fn an_image_has_its_size_in_sectors() {
    let file = image(1536);
    let disk = DiskFile::open(file.path(), false).unwrap();
    let geometry = disk.geometry();
    assert!(!disk.is_block_device());
    assert_eq!((geometry.sectors, geometry.logical_block, geometry.read_only), (3, 512, false));
    assert!(geometry.physical_block >= 4096);
}

#[test]
fn what_is_no_disk_is_refused_with_the_path_and_a_cure() {
    let dir = TempDir::new().unwrap();
    let (small, uneven) = (image(511), image(1025));
    let missing = dir.path().join("missing");
    let cases = [
        (missing.as_path(), "does not exist", "truncate"),
        (dir.path(), "is a directory", "name a raw image"),
        (Path::new("/dev/null"), "neither a file nor a block device", "name one"),
        (small.path(), "511 bytes", "enlarge"),
        (uneven.path(), "1025 bytes, not a multiple of 512", "truncate --size=%512"),
    ];
    for (path, reason, cure) in cases {
        for read_only in [false, true] {
            let text = refusal(path, read_only).to_string();
            assert!(text.contains(&path.display().to_string()), "{text}");
            assert!(text.contains(reason) && text.contains(cure), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }
}

#[test]
fn a_named_pipe_does_not_hold_us_up() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("pipe");
    std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(matches!(refusal(&path, true), DiskError::NotStorage(_)));
    assert!(matches!(refusal(&path, false), DiskError::NotStorage(_)));
}

#[test]
fn errors_of_the_host_are_told_apart() {
    let error = |errno, read_only| {
        open_error(Path::new("/disk"), read_only, io::Error::from_raw_os_error(errno)).to_string()
    };
    assert!(error(libc::EACCES, true).contains("for reading"));
    assert!(error(libc::EACCES, false).contains("for writing"));
    assert!(error(libc::EROFS, false).contains("attach it read-only"));
    assert!(error(libc::EMFILE, false).contains("cannot be opened"));
}

#[test]
fn a_writable_disk_excludes_everybody_and_a_read_only_one_writers() {
    let file = image(4096);
    let writer = DiskFile::open(file.path(), false).unwrap();
    assert!(matches!(refusal(file.path(), false), DiskError::InUse(_)));
    assert!(refusal(file.path(), true).to_string().contains("stop that one"));
    drop(writer);
    let _reader = DiskFile::open(file.path(), true).unwrap();
    let _second = DiskFile::open(file.path(), true).unwrap();
    assert!(matches!(refusal(file.path(), false), DiskError::InUse(_)));
}

#[test]
fn an_image_format_is_never_recognised() {
    let mut file = image(4096);
    file.write_all(b"QFI\xfb\0\0\0\x03").unwrap();
    let disk = DiskFile::open(file.path(), false).unwrap();
    assert_eq!(disk.geometry().sectors, 8);
}
