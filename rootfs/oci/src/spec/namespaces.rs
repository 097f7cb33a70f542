//! Namespaces: the virtual machine is the pod, so its network namespace is that of all containers,
//! and those of the host that a spec names stand for the sandbox's.

use super::{Error, Sandbox};
use serde_json::{Map, Value, json};

/// What the container has of its own, or joins.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kept {
    /// A pid namespace of its own.
    pub private_pids: bool,
    /// Any uts namespace but the guest's.
    pub uts: bool,
    /// Any ipc namespace but the guest's.
    pub ipc: bool,
}

/// Rewrites the list of namespaces.
pub fn adapt(
    linux: &mut Map<String, Value>,
    sandbox: Option<Sandbox>,
    warnings: &mut Vec<String>,
) -> Result<Kept, Error> {
    let asked = match linux.remove("namespaces") {
        Some(Value::Array(asked)) => asked,
        _ => Vec::new(),
    };
    // A container that shares the guest's mounts is none, and one that sees the whole tree of
    // control groups has no use for it.
    let mut kept = vec![json!({ "type": "mount" }), json!({ "type": "cgroup" })];
    let mut has = Kept::default();
    for namespace in &asked {
        let kind = namespace["type"].as_str().unwrap_or_default();
        let path = namespace["path"].as_str().filter(|path| !path.is_empty());
        match (kind, path) {
            ("user", _) => return Err(Error::UserNamespace),
            ("mount" | "cgroup" | "network", _) => {}
            ("pid" | "ipc" | "uts" | "time", None) => {
                kept.push(json!({ "type": kind }));
                has.private_pids |= kind == "pid";
                has.keep(kind);
            }
            ("pid" | "ipc" | "uts", Some(path)) => match sandbox {
                Some(Sandbox { pid }) => {
                    let path = format!("/proc/{pid}/ns/{kind}");
                    kept.push(json!({ "type": kind, "path": path }));
                    has.keep(kind);
                }
                None if kind == "pid" => return Err(Error::PidNamespace(path.to_owned())),
                // The guest's own is the sandbox's.
                None => {}
            },
            (other, _) => warnings.push(format!("the {other} namespace was left out")),
        }
    }
    linux.insert("namespaces".into(), Value::Array(kept));
    Ok(has)
}

impl Kept {
    fn keep(&mut self, kind: &str) {
        self.uts |= kind == "uts";
        self.ipc |= kind == "ipc";
    }
}

/// Takes out the kernel parameters of namespaces that are the guest's.
pub fn take_sysctls(linux: &mut Map<String, Value>, kept: &Kept) -> Vec<(String, String)> {
    let Some(Value::Object(all)) = linux.remove("sysctl") else { return Vec::new() };
    let (mut taken, mut left) = (Vec::new(), Map::new());
    for (name, value) in all {
        // Both spellings are in use.
        let dotted = name.replace('/', ".");
        let of_guest = dotted.starts_with("net.")
            || (is_ipc(&dotted) && !kept.ipc)
            || (dotted == "kernel.domainname" && !kept.uts);
        match value.as_str() {
            Some(text) if of_guest => taken.push((dotted, text.to_owned())),
            _ => drop(left.insert(name, value)),
        }
    }
    if !left.is_empty() {
        linux.insert("sysctl".into(), Value::Object(left));
    }
    taken
}

/// ipc_namespaces(7).
fn is_ipc(name: &str) -> bool {
    name.starts_with("kernel.shm")
        || name.starts_with("kernel.msg")
        || name == "kernel.sem"
        || name.starts_with("fs.mqueue.")
}
