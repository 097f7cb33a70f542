//! Programs of the host for a guest: an image with a program and the libraries that it needs.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::image;
use crate::place::Place;

/// An erofs image with programs of the host in `bin`, and in `lib` their libraries with the loader,
/// as `ld.so`.
///
/// # Panics
/// If one of them is not installed.
#[track_caller]
pub fn programs(place: &Place, paths: &[&str]) -> String {
    let root = place.given_folder("tools");
    for folder in ["bin", "lib"] {
        fs::create_dir(Path::new(&root).join(folder)).unwrap();
    }
    for path in paths {
        let to = Path::new(&root).join("bin").join(Path::new(path).file_name().unwrap());
        fs::copy(path, to).unwrap_or_else(|error| panic!("{path}: {error}; run tests/packages"));
        for library in libraries(path) {
            let name = Path::new(&library).file_name().unwrap().to_string_lossy().into_owned();
            let name = if name.starts_with("ld-linux") { "ld.so".to_owned() } else { name };
            fs::copy(&library, Path::new(&root).join("lib").join(name)).unwrap();
        }
    }
    let image = crate::artifacts::text(&place.given_path("tools.erofs"));
    image::host("mkfs.erofs", &["--quiet", &image, &root]);
    fs::remove_dir_all(root).unwrap();
    image
}

/// The libraries of a program, and the loader.
fn libraries(program: &str) -> Vec<String> {
    let output = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // "libc.so.6 => /lib/libc.so.6 (0x…)", "/lib64/ld-linux-x86-64.so.2 (0x…)"
    let paths =
        text.lines().filter_map(|line| line.split_whitespace().find(|w| w.starts_with('/')));
    paths.map(str::to_owned).collect()
}

/// Shell that mounts such an image, which is persistent memory, at `/tools`.
pub const MOUNT: &str = "mkdir -p /tools && mount -t erofs -o dax /dev/pmem0 /tools";

/// Shell that starts a program of it; its arguments follow.
pub fn start(program: &str) -> String {
    format!("/tools/lib/ld.so --library-path /tools/lib /tools/bin/{program}")
}
