//! The process of a spec, or one that is added later.

use super::Error;
use crate::guest::Guest;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// What libcontainer leaves to the executor: the last steps before the program runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Last {
    /// As in the spec, all sets; `None`, of a process that is added, for those of the container.
    pub capabilities: Option<Value>,
    /// The profile, as in the spec.
    pub seccomp: Option<Value>,
    /// Whether the program can never gain privileges.
    pub no_new_privileges: bool,
    /// Whether it gets a terminal.
    pub terminal: bool,
    /// The terminal's first size, rows and columns.
    pub size: Option<(u16, u16)>,
}

const CAPABILITIES: [&str; 41] = [
    "CAP_AUDIT_CONTROL",
    "CAP_AUDIT_READ",
    "CAP_AUDIT_WRITE",
    "CAP_BLOCK_SUSPEND",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_KILL",
    "CAP_LEASE",
    "CAP_LINUX_IMMUTABLE",
    "CAP_MAC_ADMIN",
    "CAP_MAC_OVERRIDE",
    "CAP_MKNOD",
    "CAP_NET_ADMIN",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_RAW",
    "CAP_PERFMON",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_CHROOT",
    "CAP_SYS_MODULE",
    "CAP_SYS_NICE",
    "CAP_SYS_PACCT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
];

const RLIMITS: [&str; 16] = [
    "RLIMIT_AS",
    "RLIMIT_CORE",
    "RLIMIT_CPU",
    "RLIMIT_DATA",
    "RLIMIT_FSIZE",
    "RLIMIT_LOCKS",
    "RLIMIT_MEMLOCK",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_NOFILE",
    "RLIMIT_NPROC",
    "RLIMIT_RSS",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
    "RLIMIT_SIGPENDING",
    "RLIMIT_STACK",
];

/// Adapts the process, and takes out what is left to the executor.
///
/// # Errors
/// [`Error`].
pub fn adapt_process(
    process: &mut Map<String, Value>,
    guest: &Guest,
    warnings: &mut Vec<String>,
) -> Result<Last, Error> {
    let program = process.get("args").and_then(|args| args.get(0)).and_then(Value::as_str);
    if program.is_none_or(str::is_empty) {
        return Err(Error::Missing("program: process.args is empty"));
    }
    let cwd = process.entry("cwd").or_insert_with(|| json!("/"));
    match cwd.as_str() {
        Some(path) if path.starts_with('/') => {}
        Some("") => *cwd = json!("/"),
        _ => {
            let path = cwd.to_string();
            return Err(Error::NotAbsolute { what: "process.cwd", path });
        }
    }
    process.entry("user").or_insert_with(|| json!({ "uid": 0, "gid": 0 }));
    for (name, why) in [
        ("apparmorProfile", "the guest has no AppArmor"),
        ("selinuxLabel", "the guest has no SELinux"),
        ("execCPUAffinity", "the host's processors are not the guest's"),
    ] {
        match process.remove(name) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() || text == "unconfined" => {}
            Some(_) => warnings.push(format!("process.{name} was left out: {why}")),
        }
    }
    adapt_rlimits(process, guest, warnings);
    let no_new_privileges =
        process.get("noNewPrivileges").and_then(Value::as_bool).unwrap_or(false);
    if !no_new_privileges {
        process.remove("noNewPrivileges");
    }
    let capabilities = process.remove("capabilities").filter(|value| !value.is_null());
    Ok(Last {
        capabilities: capabilities.map(|sets| known_capabilities(&sets, warnings)),
        seccomp: None,
        no_new_privileges,
        terminal: process.get("terminal").and_then(Value::as_bool).unwrap_or(false),
        size: size(process),
    })
}

fn size(process: &Map<String, Value>) -> Option<(u16, u16)> {
    let size = process.get("consoleSize")?;
    let side = |name: &str| u16::try_from(size[name].as_u64()?).ok();
    match (side("height")?, side("width")?) {
        (0, _) | (_, 0) => None,
        size => Some(size),
    }
}

const SETS: [&str; 5] = ["bounding", "effective", "permitted", "inheritable", "ambient"];

/// All sets; one that is absent is empty. A host newer than this guest may know more capabilities:
/// to lack one is always safe.
fn known_capabilities(sets: &Value, warnings: &mut Vec<String>) -> Value {
    let mut all = Map::new();
    for set in SETS {
        let mut known = Vec::new();
        for name in sets[set].as_array().into_iter().flatten() {
            let warning = format!("the capability {name} is not known and was left out");
            if name.as_str().is_some_and(|name| CAPABILITIES.contains(&name)) {
                known.push(name.clone());
            } else if !warnings.contains(&warning) {
                warnings.push(warning);
            }
        }
        all.insert(set.to_owned(), Value::Array(known));
    }
    Value::Object(all)
}

/// No capability at all.
pub fn no_capabilities() -> Value {
    known_capabilities(&Value::Null, &mut Vec::new())
}

fn adapt_rlimits(process: &mut Map<String, Value>, guest: &Guest, warnings: &mut Vec<String>) {
    let Some(Value::Array(limits)) = process.get_mut("rlimits") else { return };
    limits.retain(|limit| {
        let known = limit["type"].as_str().is_some_and(|name| RLIMITS.contains(&name));
        if !known {
            warnings.push(format!("the limit {} is not known and was left out", limit["type"]));
        }
        known
    });
    for limit in limits.iter_mut().filter(|limit| limit["type"] == "RLIMIT_NOFILE") {
        for side in ["soft", "hard"] {
            if limit[side].as_u64().is_some_and(|asked| asked > guest.max_files) {
                limit[side] = json!(guest.max_files);
            }
        }
    }
}
