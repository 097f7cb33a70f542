//! What becomes of a container's OCI spec on its way into the guest. Pure: JSON in, JSON out, and
//! a list of what the host has to mount.
//!
//! The spec is passed on as it is, fields that nobody here knows included. Changed is only what the
//! host provides: sources of bind mounts, and the root. What else was meant for a host's kernel,
//! `cube-oci` in the guest knows how to take.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::place::GUEST_SHARE;

/// CRI's name for the sandbox that a container is in.
const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";
/// The same for clients that group containers themselves.
const GROUP: &str = "io.containerd.runc.v2.group";

/// A spec for the guest, and what it needs of the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapted {
    /// The spec.
    pub spec: Value,
    /// What is mounted into the container's folder of the share.
    pub volumes: Vec<Volume>,
    /// Whether the root is read-only.
    pub read_only_root: bool,
}

/// A file or folder of the host that the container shall see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Where it is on the host.
    pub source: PathBuf,
    /// Its name in the container's `mounts` folder.
    pub name: String,
    /// Enforced on the host.
    pub read_only: bool,
    /// With what is mounted below it.
    pub recursive: bool,
}

/// The sandbox that a container with this spec belongs to, if not to one of its own.
pub fn group(spec: &Value) -> Option<&str> {
    let annotations = &spec["annotations"];
    [SANDBOX_ID, GROUP].iter().find_map(|name| annotations[*name].as_str())
}

/// Where a spec that was adapted has its volumes, in the order of their names.
pub fn volumes_inside(adapted: &Value) -> Vec<String> {
    let mounts = adapted["mounts"].as_array().into_iter().flatten();
    let ours = mounts.filter(|mount| {
        mount["source"].as_str().is_some_and(|source| Path::new(source).starts_with(GUEST_SHARE))
    });
    ours.map(|mount| mount["destination"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Makes the spec of container `id` fit for the guest.
pub fn adapt(mut spec: Value, id: &str) -> Result<Adapted> {
    if !spec["process"]["args"].is_array() {
        let message = "config.json has no process.args, the command to run";
        return Err(Error::Invalid(message.to_owned()));
    }
    let read_only_root = spec["root"]["readonly"].as_bool().unwrap_or_default();
    spec["root"]["path"] = json!("rootfs");
    let mut volumes = Vec::new();
    let guest_folder = Path::new(GUEST_SHARE).join(id).join("mounts");
    for mount in spec["mounts"].as_array_mut().into_iter().flatten() {
        if let Some(volume) = volume(mount, volumes.len())? {
            mount["source"] = json!(guest_folder.join(&volume.name));
            volumes.push(volume);
        }
    }
    Ok(Adapted { spec, volumes, read_only_root })
}

/// What the host has to provide for a mount, if anything. The mount's source is changed where the
/// guest has the like itself.
fn volume(mount: &mut Value, number: usize) -> Result<Option<Volume>> {
    let options: Vec<String> = serde_json::from_value(mount["options"].clone()).unwrap_or_default();
    let has = |name: &str| options.iter().any(|option| option == name);
    let bind = mount["type"].as_str() == Some("bind") || has("bind") || has("rbind");
    if !bind {
        return Ok(None);
    }
    let destination = mount["destination"].as_str().unwrap_or_default().to_owned();
    let source = mount["source"].as_str().unwrap_or_default().to_owned();
    if !source.starts_with('/') {
        return Err(Error::Invalid(format!(
            "the source {source:?} of the mount at {destination:?} is not an absolute path"
        )));
    }
    if destination == "/dev/shm" {
        // Memory that the pod's containers share: the guest's own, there is one per pod.
        mount["source"] = json!("/dev/shm");
        return Ok(None);
    }
    if ["/proc", "/sys", "/dev"].iter().any(|kernel| Path::new(&source).starts_with(kernel)) {
        return Err(Error::Invalid(format!(
            "{source} cannot be mounted at {destination:?}: it is the host kernel's, and the \
             container has a kernel of its own"
        )));
    }
    Ok(Some(Volume {
        source: source.into(),
        name: number.to_string(),
        read_only: has("ro"),
        recursive: has("rbind"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(mounts: &Value) -> Value {
        json!({
            "process": {"args": ["sh"], "unknown": 1},
            "root": {"path": "/host/rootfs", "readonly": true},
            "mounts": mounts,
            "linux": {"namespaces": [
                {"type": "network", "path": "/var/run/netns/x"},
                {"type": "ipc", "path": "/proc/7/ns/ipc"},
                {"type": "pid"},
            ]},
        })
    }

    #[test]
    fn a_bind_mount_comes_through_the_share() {
        let mounts = json!([
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/data", "type": "bind", "source": "/srv/d", "options": ["rbind", "ro"]},
        ]);
        let adapted = adapt(spec(&mounts), "web").unwrap();
        assert_eq!(adapted.spec["mounts"][1]["source"], "/run/cube/share/web/mounts/0");
        let volume = Volume {
            source: "/srv/d".into(),
            name: "0".to_owned(),
            read_only: true,
            recursive: true,
        };
        assert_eq!(adapted.volumes, [volume]);
    }

    #[test]
    fn the_root_is_in_the_share_and_what_is_unknown_stays() {
        let adapted = adapt(spec(&json!([])), "web").unwrap();
        assert_eq!(adapted.spec["root"], json!({"path": "rootfs", "readonly": true}));
        assert_eq!(adapted.spec["linux"], spec(&json!([]))["linux"]);
        assert_eq!(adapted.spec["process"]["unknown"], 1);
        assert!(adapted.read_only_root);
    }

    #[test]
    fn shared_memory_is_the_guest_s() {
        let mounts = json!([
            {"destination": "/dev/shm", "type": "bind", "source": "/run/x/shm", "options": ["rbind"]},
        ]);
        let adapted = adapt(spec(&mounts), "web").unwrap();
        assert_eq!(adapted.spec["mounts"][0]["source"], "/dev/shm");
        assert_eq!(adapted.volumes, []);
    }

    #[test]
    fn mounts_that_cannot_be_are_refused_by_name() {
        let refusal = |source: &str| {
            let mounts = json!([{"destination": "/x", "type": "bind", "source": source}]);
            adapt(spec(&mounts), "web").unwrap_err().to_string()
        };
        assert!(refusal("/dev/sda").starts_with("/dev/sda cannot be mounted at \"/x\""));
        assert!(refusal("relative").contains("\"relative\" of the mount at \"/x\""));
        assert!(adapt(json!({}), "web").unwrap_err().to_string().contains("process.args"));
    }

    #[test]
    fn a_pod_s_containers_have_one_sandbox() {
        assert_eq!(group(&json!({"annotations": {SANDBOX_ID: "pod"}})), Some("pod"));
        assert_eq!(group(&json!({"annotations": {GROUP: "g"}})), Some("g"));
        assert_eq!(group(&json!({})), None);
    }
}
