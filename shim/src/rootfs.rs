//! Puts a container's files where the guest sees them: its root as the snapshotter gives it, its
//! volumes, its spec. Nothing is copied.

use std::fs::{self, File};
use std::path::Path;

use containerd_shim::mount::mount_rootfs;
use containerd_shim_protos::types::mount::Mount;
use nix::mount::{MsFlags, mount};
use serde_json::Value;

use crate::error::{Error, Result, io};
use crate::place::Place;
use crate::spec::{Adapted, Volume};
use crate::{mount_points, record};

/// A container's root, in containerd's words.
#[derive(Clone, Debug)]
pub struct Root<'a> {
    /// What to mount, one over the other.
    pub mounts: &'a [Mount],
    /// What it is without mounts: a folder, as the spec says.
    pub folder: &'a Path,
}

/// Lays out what the guest sees of container `id`. Leaves nothing behind if it fails.
pub fn lay_out(place: &Place, id: &str, root: &Root<'_>, adapted: &Adapted) -> Result<()> {
    let done = try_lay_out(&place.container(id), root, adapted);
    if done.is_err()
        && let Err(error) = place.clear_container(id)
    {
        tracing::error!(%error, id, "a container's files are left");
    }
    done
}

fn try_lay_out(container: &Path, root: &Root<'_>, adapted: &Adapted) -> Result<()> {
    let rootfs = container.join("rootfs");
    make_folder(&rootfs)?;
    if root.mounts.is_empty() {
        bind(root.folder, &rootfs, true)?;
    }
    for mount in root.mounts {
        mount_one(mount, &rootfs)?;
    }
    if adapted.read_only_root {
        mount_points::make(&rootfs, adapted)?;
    }
    restrict(&rootfs, adapted.read_only_root)?;
    for volume in &adapted.volumes {
        provide(volume, &container.join("mounts"))?;
    }
    record::write::<Value>(&container.join("config.json"), &adapted.spec)
}

fn mount_one(mount: &Mount, target: &Path) -> Result<()> {
    let (kind, source) = (mount.type_.as_str(), mount.source.as_str());
    mount_rootfs(Some(kind), Some(source), &mount.options, target).map_err(|error| {
        Error::Invalid(format!(
            "the root cannot be mounted: {kind} from {source:?} with options {}: {error}",
            mount.options.join(",")
        ))
    })
}

fn provide(volume: &Volume, folder: &Path) -> Result<()> {
    let target = folder.join(&volume.name);
    let meta = fs::metadata(&volume.source).map_err(|error| {
        Error::Invalid(format!("cannot mount {}: {error}", volume.source.display()))
    })?;
    if meta.is_dir() {
        make_folder(&target)?;
    } else {
        make_folder(folder)?;
        File::create(&target).map_err(io(format!("make {}", target.display())))?;
    }
    bind(&volume.source, &target, volume.recursive)?;
    restrict(&target, volume.read_only)
}

fn make_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(io(format!("make the folder {}", path.display())))
}

fn bind(source: &Path, target: &Path, recursive: bool) -> Result<()> {
    let flags = MsFlags::MS_BIND | if recursive { MsFlags::MS_REC } else { MsFlags::empty() };
    mount(Some(source), target, None::<&str>, flags, None::<&str>).map_err(io(format!(
        "mount {} at {}",
        source.display(),
        target.display()
    )))
}

/// What the file server has no use for: it opens no devices for a guest, and runs nothing. The guest
/// mounts its share as it likes, so programs there may still be set-user-id.
fn restrict(target: &Path, read_only: bool) -> Result<()> {
    let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
    flags.set(MsFlags::MS_RDONLY, read_only);
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
        .map_err(io(format!("restrict the mount {}", target.display())))
}
