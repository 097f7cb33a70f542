//! The annotations that begin with `cube.`: which are followed, which are passed over and why, and
//! which are refused, since a container that ran without what they ask for would be another one.
//! `README.md` has the same table for people.

use serde_json::Value;

use crate::error::{Error, Result};

/// What becomes of an annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// It is done.
    Followed,
    /// It is not, for this reason, and nothing is missing.
    PassedOver(&'static str),
    /// It cannot be, for this reason.
    Refused(&'static str),
}

use Treatment::{Followed, PassedOver, Refused};

const LAYERS: &str = "containers' roots come from containerd's snapshotter, in the create call";
const SHARES: &str = "host folders are mounts of the spec, of type bind";
const GIVEN: &str = "interfaces, addresses and routes are taken from the pod's network namespace";
const VFIO: &str = "there is no passthrough of devices";
const STILL: &str = "a sandbox is not kept still for others yet";
const LINEAGE: &str = "what a snapshot comes from is in its own folder";

/// All that are known.
pub const KNOWN: &[(&str, Treatment)] = &[
    ("cube.pause.to", Followed),
    ("cube.ready", Followed),
    ("cube.ready.timeout", Followed),
    ("cube.restore.from", Followed),
    ("cube.restore.container", Followed),
    ("cube.vmmres", Followed),
    ("cube.vm.kernel.path", Followed),
    ("cube.vm.snapshot.base.path", Followed),
    ("cube.appsnapshot.create", Followed),
    ("cube.appsnapshot.restore", Followed),
    ("cube.appsnapshot.container.id", Followed),
    ("cube.snapshot.disable", Followed),
    ("cube.disk", Refused("there are no disks beside the roots of containers yet")),
    ("cube.pmem", Refused(LAYERS)),
    ("cube.rootfs.info", Refused(LAYERS)),
    ("cube.rootfs.wlayer.path", Refused(LAYERS)),
    ("cube.rootfs.wlayer.subdir", Refused(LAYERS)),
    ("cube.net", Refused(GIVEN)),
    ("cube.net.vips", Refused(GIVEN)),
    ("cube.fs", Refused(SHARES)),
    ("cube.virtiofs", Refused(SHARES)),
    ("cube.propagation.mounts", Refused(SHARES)),
    ("cube.propagation.container.mounts", Refused(SHARES)),
    ("cube.propagation.exec.mounts", Refused(SHARES)),
    ("cube.propagation.container.umounts", PassedOver("there is nothing to hide from a container")),
    ("cube.sandbox.dns", PassedOver("a container's /etc/resolv.conf is a mount of its spec")),
    ("cube.vm.kernel.cmdline.append", Refused("the guest's command line is the operator's")),
    ("cube.vm.os-image.path", Refused("the guest's root image is the operator's: initrd")),
    ("cube.vm.agent.path", Refused("the agent is in the guest's root image")),
    ("cube.vm.snapshot.memory_vol_url", Refused("memory is in the snapshot's folder")),
    ("cube.vm.pmu", PassedOver("guests have no performance counters")),
    ("cube.snapshot.healthcheck", PassedOver("a create that returns is the health check")),
    ("cube.container.custom.file", Refused("files are mounts of the spec")),
    ("cube.container.log_forwarding", PassedOver("output always goes to containerd")),
    ("cube.container.rootfs.propagation", PassedOver("the spec's own field counts")),
    ("cube.use_passfd_io", PassedOver("streams are connections of their own anyway")),
    ("cube.vfio.net", Refused(VFIO)),
    ("cube.vfio.disk", Refused(VFIO)),
    ("cube.vfio.disk.rm", Refused(VFIO)),
    ("cube.master.enable_ivshmem", Refused("there is no memory shared between guests")),
    ("cube.master.pause.snapshot.id", PassedOver(LINEAGE)),
    ("cube.master.runtime.snapshot.id", PassedOver(LINEAGE)),
    ("cube.master.runtime.restore.snapshot.id", PassedOver(LINEAGE)),
    ("cube.master.launch.memory.snapshot.id", PassedOver(LINEAGE)),
    ("cube.master.storage.backend", PassedOver(LINEAGE)),
    ("cube.master.snapshot.remote_uuids", PassedOver(LINEAGE)),
    ("cube.master.snapshot.cross_node", PassedOver(LINEAGE)),
    ("cube.master.desired.sandbox.id", PassedOver(LINEAGE)),
    ("cube.pause.keep_tombstone", PassedOver("a paused sandbox leaves nothing when it is deleted")),
    (
        "cube.pause.delete_tombstone",
        PassedOver("a paused sandbox leaves nothing when it is deleted"),
    ),
    ("cube.shimapi.update.action", Followed),
    ("cube.shimapi.update.pause.snapshot_config", Followed),
    ("cube.shimapi.update.rollback.restore_config", Refused("a sandbox does not go back yet")),
    ("cube.shimapi.update.snapshot.capture_config", Refused(STILL)),
    ("cube.shimapi.update.snapshot.id", Refused(STILL)),
    ("cube.product", PassedOver("it is for others")),
    ("cube.vm.image.path", PassedOver("it is for others")),
    ("cube.runtime.config.path", PassedOver("settings are in /etc/cube/config.toml")),
    ("cube.sandbox_cgroup_path", PassedOver("it is for others")),
    ("cube.msg.dev.path", PassedOver("it is for others")),
];

/// Refuses a container that asks for what is not here, and logs what is passed over.
pub fn check(spec: &Value) -> Result<()> {
    check_names(
        spec["annotations"].as_object().into_iter().flatten().map(|(name, _)| name.as_str()),
    )
}

/// The same for those of any call.
pub fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<()> {
    for name in names.filter(|name| name.starts_with("cube.")) {
        match KNOWN.iter().find(|(known, _)| *known == name).map(|(_, treatment)| treatment) {
            Some(Followed) => {}
            Some(PassedOver(reason)) => {
                tracing::info!(name, reason, "an annotation is passed over")
            }
            None => tracing::warn!(name, "an annotation is passed over: it is not known"),
            Some(Refused(reason)) => {
                return Err(Error::Invalid(format!(
                    "the annotation {name} is not supported: {reason}; leave it out"
                )));
            }
        }
    }
    Ok(())
}

/// A folder with a checkpoint, in Cubelet's words: its base folder, and the size that it was made for
/// below that.
pub fn app_snapshot(spec: &Value) -> Result<Option<String>> {
    let annotations = &spec["annotations"];
    let has = |name: &str| !annotations[name].is_null();
    let (restore, create) = (has("cube.appsnapshot.restore"), has("cube.appsnapshot.create"));
    for (other, there) in [
        ("cube.appsnapshot.create", create),
        ("cube.snapshot.disable", has("cube.snapshot.disable")),
    ] {
        if restore && there {
            return Err(Error::Invalid(format!(
                "the annotations cube.appsnapshot.restore and {other} contradict each other; leave \
                 one out"
            )));
        }
    }
    if !restore {
        return Ok(None);
    }
    let Some(base) = annotations["cube.vm.snapshot.base.path"].as_str() else {
        return Err(Error::Invalid(
            "cube.appsnapshot.restore needs cube.vm.snapshot.base.path, the folder with the snapshots"
                .to_owned(),
        ));
    };
    let resources = Resources::of(spec)?.ok_or_else(|| {
        Error::Invalid("cube.appsnapshot.restore needs cube.vmmres, the VM's size".to_owned())
    })?;
    let memory = resources.snap_memory.filter(|memory| *memory > 0).unwrap_or(resources.memory);
    Ok(Some(format!("{base}/{}C{memory}M", resources.cpu)))
}

/// A VM's size, in Cubelet's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Resources {
    /// Processors.
    pub cpu: u32,
    /// MiB.
    pub memory: u64,
    /// MiB of the VM that the snapshot was made of, if another.
    pub snap_memory: Option<u64>,
}

impl Resources {
    /// Those of a spec, if it has any.
    pub fn of(spec: &Value) -> Result<Option<Self>> {
        let Some(text) = spec["annotations"]["cube.vmmres"].as_str() else { return Ok(None) };
        let resources: Self = serde_json::from_str(text).map_err(|error| {
            Error::Invalid(format!(
                "the annotation cube.vmmres is {text:?}: {error}; expected for example \
                 {{\"cpu\":2,\"memory\":2048}}"
            ))
        })?;
        if resources.cpu == 0 || resources.memory == 0 {
            return Err(Error::Invalid(format!(
                "the annotation cube.vmmres is {text:?}: neither cpu nor memory may be 0"
            )));
        }
        Ok(Some(resources))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(annotations: &Value) -> Value {
        json!({"annotations": annotations})
    }

    #[test]
    fn people_are_told_of_every_key() {
        let readme = include_str!("../README.md");
        for (name, treatment) in KNOWN {
            let word = match treatment {
                Followed => "followed",
                PassedOver(_) => "passed over",
                Refused(_) => "refused",
            };
            let (name, word) = (format!("`{name}`"), format!("| {word} |"));
            let told = readme.lines().any(|line| line.contains(&name) && line.contains(&word));
            assert!(told, "{name} {word}");
        }
    }

    #[test]
    fn what_would_make_another_container_is_refused_with_the_reason() {
        let error = check(&spec(&json!({"cube.disk": "[]"}))).unwrap_err().to_string();
        assert!(error.starts_with("the annotation cube.disk is not supported: "), "{error}");
        check(&spec(&json!({"cube.product": "x", "cube.unheard": "y", "other": "z"}))).unwrap();
    }

    #[test]
    fn an_app_snapshot_is_found_by_the_size_it_was_made_for() {
        let annotations = json!({
            "cube.appsnapshot.restore": "", "cube.vm.snapshot.base.path": "/s/tpl",
            "cube.vmmres": "{\"cpu\":2,\"memory\":1024,\"preserve_memory\":0,\"snap_memory\":2048}",
        });
        assert_eq!(app_snapshot(&spec(&annotations)).unwrap().unwrap(), "/s/tpl/2C2048M");
        assert_eq!(app_snapshot(&spec(&json!({}))).unwrap(), None);
    }

    #[test]
    fn contradictions_and_what_is_malformed_are_refused_by_name() {
        for other in ["cube.appsnapshot.create", "cube.snapshot.disable"] {
            let both = spec(&json!({"cube.appsnapshot.restore": "", other: ""}));
            let error = app_snapshot(&both).unwrap_err().to_string();
            assert!(error.contains(other), "{error}");
        }
        let alone = spec(&json!({"cube.appsnapshot.restore": ""}));
        let error = app_snapshot(&alone).unwrap_err().to_string();
        assert!(error.contains("cube.vm.snapshot.base.path"), "{error}");
        for bad in ["{", "{\"cpu\":0,\"memory\":1}", "{\"cpu\":\"two\",\"memory\":1}", "[]"] {
            let error = Resources::of(&spec(&json!({"cube.vmmres": bad}))).unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")), "{error}");
        }
    }
}
