use super::*;
use crate::guest::Device;

fn guest() -> Guest {
    let null = Device { kind: 'c', major: 1, minor: 3 };
    let disk = Device { kind: 'b', major: 254, minor: 16 };
    Guest {
        cpus: [0, 1].into(),
        max_files: 1 << 20,
        swap: true,
        filesystems: ["proc".to_owned(), "mqueue".to_owned()].into(),
        huge_pages: ["2MB".to_owned()].into(),
        devices: [("/dev/null".to_owned(), null), ("/dev/data".to_owned(), disk)].into(),
    }
}

/// The smallest spec, with one part of it replaced.
fn spec(pointer: &str, value: Value) -> Value {
    let mut spec = json!({
        "ociVersion": "1.2.0", "process": { "args": ["sh"], "cwd": "/" },
        "root": {}, "linux": {}, "mounts": [], "hooks": {},
    });
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    spec.pointer_mut(parent).unwrap()[name] = value;
    spec
}

fn adapt_with(pointer: &str, value: Value, sandbox: Option<Sandbox>) -> Result<Adapted, Error> {
    let place = Place { id: "c1", bundle: Path::new("/run/bundle") };
    adapt(spec(pointer, value), place, &guest(), sandbox)
}

#[track_caller]
fn adapted(pointer: &str, value: Value) -> Adapted {
    adapt_with(pointer, value, None).unwrap()
}

#[test]
fn the_root_is_in_the_bundle_unless_it_says_otherwise() {
    let root = |value| adapted("/root", value).spec["root"]["path"].clone();
    assert_eq!(root(json!({})), "/run/bundle/rootfs");
    assert_eq!(root(json!({ "path": "tree" })), "/run/bundle/tree");
    assert_eq!(root(json!({ "path": "/other" })), "/other");
}

#[test]
fn the_control_group_is_below_cube_whatever_the_host_calls_it() {
    let linux = json!({ "cgroupsPath": "kubepods-burstable.slice:cri-containerd:0815" });
    assert_eq!(adapted("/linux", linux).spec["linux"]["cgroupsPath"], "/cube/c1");
}

#[test]
fn the_network_is_the_guests_and_mounts_are_always_private() {
    let asked = json!([{ "type": "network", "path": "/var/run/netns/x" }, { "type": "pid" }]);
    let adapted = adapted("/linux/namespaces", asked);
    let expected = json!([{ "type": "mount" }, { "type": "cgroup" }, { "type": "pid" }]);
    assert_eq!(adapted.spec["linux"]["namespaces"], expected);
    assert!(adapted.private_pids);
}

#[test]
fn namespaces_of_the_host_are_the_sandboxs() {
    let asked = json!([
        { "type": "ipc", "path": "/proc/4711/ns/ipc" },
        { "type": "pid", "path": "/proc/4711/ns/pid" },
    ]);
    let joined = adapt_with("/linux/namespaces", asked, Some(Sandbox { pid: 7 })).unwrap();
    let expected = json!([
        { "type": "mount" },
        { "type": "cgroup" },
        { "type": "ipc", "path": "/proc/7/ns/ipc" },
        { "type": "pid", "path": "/proc/7/ns/pid" },
    ]);
    assert_eq!(joined.spec["linux"]["namespaces"], expected);
    assert!(!joined.private_pids);
}

#[test]
fn without_a_sandbox_ipc_and_uts_are_the_guests_and_pid_is_refused() {
    let asked = json!([{ "type": "uts", "path": "/x" }, { "type": "ipc", "path": "/x" }]);
    let kept = adapted("/linux/namespaces", asked);
    let expected = json!([{ "type": "mount" }, { "type": "cgroup" }]);
    assert_eq!(kept.spec["linux"]["namespaces"], expected);
    let refused = adapt_with("/linux/namespaces", json!([{ "type": "pid", "path": "/x" }]), None);
    assert!(matches!(refused, Err(Error::PidNamespace(path)) if path == "/x"));
    let refused = adapt_with("/linux/namespaces", json!([{ "type": "user" }]), None);
    assert!(matches!(refused, Err(Error::UserNamespace)));
}

#[test]
fn a_host_name_needs_a_namespace_of_its_own() {
    let named = |namespaces: Value| {
        let mut spec = spec("/linux/namespaces", namespaces);
        spec["hostname"] = json!("web");
        let place = Place { id: "c1", bundle: Path::new("/b") };
        adapt(spec, place, &guest(), None).unwrap().spec.get("hostname").cloned()
    };
    assert_eq!(named(json!([{ "type": "uts" }])), Some(json!("web")));
    assert_eq!(named(json!([])), None);
}

#[test]
fn kernel_parameters_of_shared_namespaces_are_set_in_the_guest() {
    let sysctl = json!({
        "net.ipv4.ip_unprivileged_port_start": "0", "kernel.shmmax": "1", "kernel.sem": "2"
    });
    let linux = |namespaces: Value| json!({ "sysctl": sysctl, "namespaces": namespaces });
    let shared = adapted("/linux", linux(json!([])));
    assert_eq!((shared.sysctls.len(), shared.spec["linux"].get("sysctl")), (3, None));
    let private = adapted("/linux", linux(json!([{ "type": "ipc" }])));
    assert_eq!(private.sysctls, [("net.ipv4.ip_unprivileged_port_start".into(), "0".into())]);
    let left = json!({ "kernel.shmmax": "1", "kernel.sem": "2" });
    assert_eq!(private.spec["linux"]["sysctl"], left);
}

#[test]
fn what_the_executor_does_is_taken_out() {
    let process = json!({
        "args": ["sh"], "cwd": "", "terminal": true, "noNewPrivileges": false,
        "consoleSize": { "height": 24, "width": 80 },
        "capabilities": { "bounding": ["CAP_CHOWN", "CAP_FUTURE"] },
        "apparmorProfile": "cri-containerd.apparmor.d", "selinuxLabel": "",
    });
    let adapted = adapted("/process", process);
    let last = Last {
        capabilities: Some(json!({
            "bounding": ["CAP_CHOWN"], "effective": [], "permitted": [], "inheritable": [],
            "ambient": [],
        })),
        seccomp: None,
        no_new_privileges: false,
        terminal: true,
        size: Some((24, 80)),
    };
    assert_eq!(adapted.last, last);
    let left = adapted.spec["process"].as_object().unwrap();
    assert_eq!(left.keys().collect::<Vec<_>>(), ["args", "consoleSize", "cwd", "terminal", "user"]);
    assert_eq!(left["cwd"], "/");
    assert_eq!(adapted.warnings.len(), 2, "{:?}", adapted.warnings);
}

#[test]
fn who_names_no_capabilities_has_none_or_if_added_those_of_the_container() {
    let container = adapted("/process", json!({ "args": ["sh"] })).last.capabilities.unwrap();
    assert!(container.as_object().unwrap().values().all(|set| *set == json!([])), "{container}");
    let mut process = json!({ "args": ["sh"] });
    let process = process.as_object_mut().unwrap();
    let added = adapt_process(process, &guest(), &mut Vec::new()).unwrap();
    assert_eq!(added.capabilities, None);
}

#[test]
fn a_process_without_a_program_or_with_a_relative_folder_is_refused() {
    let refused = |process| adapt_with("/process", process, None).unwrap_err().to_string();
    assert_eq!(refused(json!({ "args": [] })), "the spec has no program: process.args is empty");
    assert_eq!(refused(json!({})), "the spec has no program: process.args is empty");
    let relative = refused(json!({ "args": ["a"], "cwd": "tmp" }));
    assert_eq!(relative, "process.cwd '\"tmp\"' is not absolute");
    assert_eq!(refused(json!(3)), "the spec has no process");
}

#[test]
fn limits_of_open_files_are_what_the_kernel_grants() {
    let rlimits = json!([
        { "type": "RLIMIT_NOFILE", "soft": 1024, "hard": 1_073_741_816_u64 },
        { "type": "RLIMIT_FUTURE", "soft": 1, "hard": 1 },
    ]);
    let adapted = adapted("/process/rlimits", rlimits);
    let expected = json!([{ "type": "RLIMIT_NOFILE", "soft": 1024, "hard": 1 << 20 }]);
    assert_eq!(adapted.spec["process"]["rlimits"], expected);
}

#[test]
fn limits_that_name_the_hosts_parts_are_left_out() {
    let resources = json!({
        "memory": { "limit": 1000, "swap": 1000, "kernel": 5, "disableOOMKiller": false },
        "cpu": { "shares": 512, "quota": 0, "cpus": "0-7", "mems": "1", "realtimeRuntime": 0 },
        "blockIO": { "weight": 0, "throttleReadBpsDevice": [{ "major": 8, "minor": 0, "rate": 1 }] },
        "hugepageLimits": [{ "pageSize": "2MB", "limit": 1 }, { "pageSize": "64KB", "limit": 1 }],
        "network": { "classID": 0x10 }, "pids": { "limit": 7 }, "unified": { "memory.oom.group": "1" },
    });
    let adapted = adapted("/linux/resources", resources);
    let expected = json!({
        "memory": { "limit": 1000, "swap": 1000 }, "cpu": { "shares": 512 },
        "hugepageLimits": [{ "pageSize": "2MB", "limit": 1 }],
        "pids": { "limit": 7 }, "unified": { "memory.oom.group": "1" },
    });
    assert_eq!(adapted.spec["linux"]["resources"], expected);
    assert_eq!(adapted.warnings.len(), 3, "{:?}", adapted.warnings);
}

#[test]
fn processors_that_the_guest_has_are_kept() {
    let adapted = adapted("/linux/resources", json!({ "cpu": { "cpus": "1" } }));
    assert_eq!(adapted.spec["linux"]["resources"]["cpu"], json!({ "cpus": "1" }));
    assert_eq!(adapted.warnings, Vec::<String>::new());
}

#[test]
fn devices_are_found_by_their_path() {
    let linux = json!({
        "devices": [
            { "path": "/dev/data", "type": "b", "major": 8, "minor": 1 },
            { "path": "/dev/nosuch", "type": "c", "major": 10, "minor": 7 },
            { "path": "/run/pipe", "type": "p" },
        ],
        "resources": { "devices": [
            { "allow": false, "access": "rwm" },
            { "allow": true, "type": "b", "major": 8, "minor": 1, "access": "rw" },
            { "allow": true, "type": "b", "major": 254, "minor": 0, "access": "rwm" },
        ] },
    });
    let adapted = adapted("/linux", linux);
    let expected = json!([
        { "path": "/dev/data", "type": "b", "major": 254, "minor": 16 },
        { "path": "/run/pipe", "type": "p" },
    ]);
    assert_eq!(adapted.spec["linux"]["devices"], expected);
    assert_eq!(adapted.spec["linux"]["resources"], json!({}));
    let deny =
        DeviceRule { allow: false, kind: None, major: None, minor: None, access: "rwm".into() };
    let data = DeviceRule {
        allow: true,
        kind: Some('b'),
        major: Some(254),
        minor: Some(16),
        access: "rw".into(),
    };
    assert_eq!(adapted.devices[..2], [deny, data]);
    // The rest are those that every container has.
    assert!(adapted.devices[2..].iter().all(|rule| rule.kind == Some('c')));
}

#[test]
fn hooks_and_security_modules_of_the_host_are_left_out_and_told() {
    let hooks = json!({ "prestart": [{ "path": "/usr/bin/nvidia" }], "poststop": [] });
    let without = adapted("/hooks", hooks);
    assert_eq!(without.warnings, ["1 prestart hooks are the host's and were left out"]);
    assert_eq!(without.spec.get("hooks"), None);
    let linux = json!({ "mountLabel": "x", "intelRdt": {}, "seccomp": { "defaultAction": "x" } });
    let without = adapted("/linux", linux);
    assert_eq!(without.warnings.len(), 2, "{:?}", without.warnings);
    assert_eq!(without.last.seccomp, Some(json!({ "defaultAction": "x" })));
}

#[test]
fn mounts_of_unknown_file_systems_go_where_containers_can_do_without() {
    let mounts = json!([
        { "destination": "/proc", "type": "proc" },
        { "destination": "/dev/mqueue", "type": "mqueue" },
    ]);
    assert_eq!(adapted("/mounts", mounts.clone()).spec["mounts"], mounts);
    let place = Place { id: "c1", bundle: Path::new("/b") };
    let bare = Guest { filesystems: ["proc".to_owned()].into(), ..guest() };
    let without = adapt(spec("/mounts", mounts), place, &bare, None).unwrap();
    assert_eq!(without.spec["mounts"].as_array().unwrap().len(), 1);
}
