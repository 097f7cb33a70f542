//! Names that a guest may give to something in a directory.
//!
//! The library hands names to the kernel as they come, so `..` or `a/b` would leave the directory. They
//! are refused here, before any system call; the jail is the second wall.

use std::ffi::CStr;
use std::io;
use std::sync::Arc;

/// Longest name of all file systems there are, in bytes.
pub const MAX_NAME: usize = 255;

/// A name in a directory: any bytes but `/` and NUL.
pub type Name = Arc<[u8]>;

/// True for one component that stays in its directory.
pub fn is_legal(name: &[u8]) -> bool {
    let reserved = matches!(name, b"" | b"." | b"..");
    !reserved && name.len() <= MAX_NAME && !name.iter().any(|byte| matches!(byte, b'/' | 0))
}

/// Refuses what is no single component: too long a name with ENAMETOOLONG, the rest with EINVAL.
pub fn check(name: &CStr) -> io::Result<&[u8]> {
    let bytes = name.to_bytes();
    match is_legal(bytes) {
        true => Ok(bytes),
        false if bytes.len() > MAX_NAME => Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG)),
        false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// How a name is shown to people: what is not UTF-8, and control characters, escaped.
pub fn shown(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    text.chars()
        .flat_map(|c| {
            let plain = (!c.is_control()).then_some(c);
            let escaped = c.is_control().then(|| c.escape_default());
            plain.into_iter().chain(escaped.into_iter().flatten())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_component_of_any_other_bytes() {
        for name in [&b"a"[..], b"...", b".x", b"\xff\xfe", b"new\nline", &[b'x'; 255]] {
            assert!(is_legal(name), "{}", shown(name));
        }
        for name in [&b""[..], b".", b"..", b"a/b", b"/", b"../x", b"a\0", &[b'x'; 256]] {
            assert!(!is_legal(name), "{}", shown(name));
        }
    }

    #[test]
    fn what_is_shown_has_no_control_characters() {
        assert_eq!(shown(b"a\nb\x1b\xff"), "a\\nb\\u{1b}\u{fffd}");
    }
}
