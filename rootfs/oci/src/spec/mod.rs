//! From the spec that a container engine wrote for its host to one for this guest. Pure: what the
//! guest has comes in as [`Guest`]. Works on JSON, so that fields that this version does not know
//! are no obstacle.
//!
//! What a guest cannot have is left out with a warning if the container can do without, and
//! refused otherwise.

mod devices;
mod namespaces;
mod process;
mod resources;

pub use devices::DeviceRule;
pub use process::{Last, adapt_process};
pub use resources::adapt_resources;

use crate::guest::Guest;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Why a spec is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something that must be there is not, or is something else.
    #[error("the spec has no {0}")]
    Missing(&'static str),
    /// A path that must be absolute.
    #[error("{what} '{path}' is not absolute")]
    NotAbsolute {
        /// Whose.
        what: &'static str,
        /// The path.
        path: String,
    },
    /// User namespaces.
    #[error("a user namespace is not supported: the virtual machine is the boundary")]
    UserNamespace,
    /// A pid namespace of a sandbox that is not here.
    #[error("the pid namespace '{0}' is the host's, and no sandbox to take its place is running")]
    PidNamespace(String),
    /// Seccomp that cannot be had.
    #[error("seccomp: {0}")]
    Seccomp(String),
    /// libcontainer's reader refuses it.
    #[error("the spec is malformed")]
    Malformed(#[source] serde_json::Error),
}

/// The other side of [`Adapted::spec`].
#[derive(Debug, Default)]
pub struct Adapted {
    /// What libcontainer gets.
    pub spec: Value,
    /// What the executor does itself, last.
    pub last: Last,
    /// Kernel parameters of the guest, since it is the network namespace of its containers.
    pub sysctls: Vec<(String, String)>,
    /// Which devices may be used, first to last; the last that matches decides.
    pub devices: Vec<DeviceRule>,
    /// Whether it is the first of a pid namespace of its own.
    pub private_pids: bool,
    /// What was left out.
    pub warnings: Vec<String>,
}

/// Whose namespaces are joined where the spec names one of the host's.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox {
    /// Its first process.
    pub pid: i32,
}

/// Where the container is, and under what name.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Its id.
    pub id: &'a str,
    /// The bundle's folder, absolute.
    pub bundle: &'a Path,
}

/// Adapts a whole spec.
///
/// # Errors
/// [`Error`].
pub fn adapt(
    mut spec: Value,
    place: Place<'_>,
    guest: &Guest,
    sandbox: Option<Sandbox>,
) -> Result<Adapted, Error> {
    let mut adapted = Adapted::default();
    let warnings = &mut adapted.warnings;
    let top = spec.as_object_mut().ok_or(Error::Missing("object at its top"))?;
    adapt_root(top, place.bundle)?;
    drop_hooks(top, warnings);
    for other in ["solaris", "windows", "vm", "zos", "freebsd"] {
        top.remove(other);
    }
    adapt_mounts(top, guest, warnings);
    let process = object(top.get_mut("process")).ok_or(Error::Missing("process"))?;
    adapted.last = adapt_process(process, guest, warnings)?;
    // Who asks for none has none.
    adapted.last.capabilities.get_or_insert_with(process::no_capabilities);

    let linux = top.entry("linux").or_insert_with(|| json!({}));
    let linux = object(Some(linux)).ok_or(Error::Missing("linux section"))?;
    adapted.last.seccomp = linux.remove("seccomp").filter(|seccomp| !seccomp.is_null());
    drop_host_only(linux, warnings);
    linux.insert("cgroupsPath".into(), json!(format!("/cube/{}", place.id)));
    let kept = namespaces::adapt(linux, sandbox, warnings)?;
    adapted.private_pids = kept.private_pids;
    adapted.sysctls = namespaces::take_sysctls(linux, &kept);
    adapted.devices = devices::adapt(linux, guest, warnings);
    if let Some(resources) = object(linux.get_mut("resources")) {
        adapt_resources(resources, guest, warnings);
    }
    if !kept.uts {
        top.remove("hostname");
        top.remove("domainname");
    }
    adapted.spec = spec;
    Ok(adapted)
}

fn object(value: Option<&mut Value>) -> Option<&mut Map<String, Value>> {
    value?.as_object_mut()
}

fn adapt_root(top: &mut Map<String, Value>, bundle: &Path) -> Result<(), Error> {
    let root = top.entry("root").or_insert_with(|| json!({ "path": "rootfs" }));
    let root = object(Some(root)).ok_or(Error::Missing("root"))?;
    let path = root.get("path").and_then(Value::as_str).filter(|path| !path.is_empty());
    let path = bundle.join(path.unwrap_or("rootfs"));
    let path = path.to_str().ok_or(Error::Missing("root that is text"))?;
    root.insert("path".into(), json!(path));
    Ok(())
}

/// Hooks are programs of the host's. `startContainer` names one of the container's, and would run
/// with privileges that the container has not: nobody writes one.
fn drop_hooks(top: &mut Map<String, Value>, warnings: &mut Vec<String>) {
    let Some(Value::Object(hooks)) = top.remove("hooks") else { return };
    for (kind, hooks) in hooks {
        let count = hooks.as_array().map_or(0, Vec::len);
        if count > 0 {
            warnings.push(format!("{count} {kind} hooks are the host's and were left out"));
        }
    }
}

/// What has no meaning here: other kernels' parts, security modules that the guest has not.
fn drop_host_only(linux: &mut Map<String, Value>, warnings: &mut Vec<String>) {
    for (name, why) in [
        ("intelRdt", "the guest has no resource director"),
        ("mountLabel", "the guest has no SELinux"),
        ("netDevices", "network devices are the virtual machine's"),
        ("memoryPolicy", "the guest has one memory node"),
    ] {
        match linux.remove(name) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(_) => warnings.push(format!("linux.{name} was left out: {why}")),
        }
    }
}

/// File systems that the guest's kernel has not, and that containers can do without.
fn adapt_mounts(top: &mut Map<String, Value>, guest: &Guest, warnings: &mut Vec<String>) {
    let Some(Value::Array(mounts)) = top.get_mut("mounts") else { return };
    mounts.retain(|mount| {
        let kind = mount["type"].as_str().unwrap_or_default();
        let missing = kind == "mqueue" && !guest.filesystems.contains(kind);
        if missing {
            warnings.push(format!("the mount on {} was left out: no {kind}", mount["destination"]));
        }
        !missing
    });
}

#[cfg(test)]
mod tests;
