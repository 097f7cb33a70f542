//! Programs of the host for a guest: an image with a program and the libraries that it needs.

use crate::artifacts::{repository, text};
use crate::image;
use crate::place::Place;

/// An erofs image with programs of the host in `bin`, and in `lib` their libraries with the loader,
/// as `ld.so`: what `tool-image` makes.
///
/// # Panics
/// If one of them is not installed.
#[track_caller]
pub fn programs(place: &Place, paths: &[&str]) -> String {
    let image = text(&place.given_path("tools.erofs"));
    let script = text(&repository().join("tests/harness/tool-image"));
    image::host(&script, &[&[image.as_str()], paths].concat());
    image
}

/// Shell that mounts such an image, which is persistent memory, at `/tools`.
pub const MOUNT: &str = "mkdir -p /tools && mount -t erofs -o dax /dev/pmem0 /tools";

/// Shell that starts a program of it; its arguments follow.
pub fn start(program: &str) -> String {
    format!("/tools/lib/ld.so --library-path /tools/lib /tools/bin/{program}")
}
