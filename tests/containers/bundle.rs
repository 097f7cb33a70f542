//! A guest with `cube-oci` in it, and bundles of its own busybox.

use guest_protocol::{ExitStatus, Spawn, WindowSize};
use harness::artifacts::Artifact;
use harness::{GuestProcess, Output, TestVm, sh};
use serde_json::{Value, json};

/// Makes the root of all bundles, from what the guest's root image has.
const TREE: &str = "mkdir -p /run/tree && cd /run/tree && mkdir -p bin dev etc proc sys tmp run var/lib \
    && cp /bin/busybox bin/ && /run/tree/bin/busybox --install -s bin \
    && for link in bin/*; do [ ! -L $link ] || ln -sf busybox $link; done \
    && chmod 1777 tmp && echo 'root:x:0:0:root:/root:/bin/sh' >etc/passwd && echo data >etc/data";

/// A guest whose root image has `cube-oci`.
pub struct Guest {
    pub vm: TestVm,
}

impl Guest {
    /// Boots it.
    #[track_caller]
    pub fn boot() -> Self {
        let initrd = Artifact::ContainerInitrd.arg();
        let vm = TestVm::builder().memory("512M").option("--initrd", initrd).boot();
        let guest = Self { vm };
        guest.run(TREE);
        guest
    }

    /// Runs a line in the guest's shell, which must succeed.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        self.vm.exec(sh(line)).text()
    }

    /// Calls `cube-oci`.
    #[track_caller]
    pub fn oci(&self, words: &[&str]) -> Output {
        self.vm.exec([&["cube-oci"], words].concat())
    }

    /// Calls `cube-oci`, which must succeed, and gives the JSON that it prints.
    #[track_caller]
    pub fn ask(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.oci(words).text()).unwrap_or(Value::Null)
    }

    /// Writes a file in the guest.
    #[track_caller]
    pub fn write(&self, path: &str, content: &Value) {
        let line = format!("mkdir -p $(dirname {path}) && cat >{path}");
        let written = self.vm.exec_with(sh(&line), content.to_string().as_bytes());
        assert!(written.status.success(), "{written:?}");
    }

    /// Makes a container, which waits to be started, and gives its keeper.
    #[track_caller]
    pub fn create(&self, id: &str, spec: &Value) -> GuestProcess {
        let (keeper, state) = self.try_create(id, spec);
        assert_eq!(state["status"], "created", "{state}");
        keeper
    }

    /// The same, of one that may fail to be; gives its state, too.
    #[track_caller]
    pub fn try_create(&self, id: &str, spec: &Value) -> (GuestProcess, Value) {
        let dir = format!("/run/bundles/{id}");
        self.write(&format!("{dir}/config.json"), spec);
        let spawn = Spawn::new(["cube-oci", "create", "--bundle", &dir, id]);
        let keeper = self.vm.start(on_terminal(spawn, &spec["process"]));
        (keeper, self.ask(&["state", "--wait-created", "120", id]))
    }

    /// Makes a container and starts it.
    #[track_caller]
    pub fn start(&self, id: &str, spec: &Value) -> GuestProcess {
        let keeper = self.create(id, spec);
        assert_eq!(self.oci(&["start", id]).text(), "");
        keeper
    }

    /// Runs a container to its end, and removes it.
    #[track_caller]
    pub fn run_container(&self, id: &str, spec: &Value) -> Output {
        let output = self.start(id, spec).end();
        assert_eq!(self.oci(&["delete", id]).text(), "");
        output
    }

    /// Adds a process to a container, and gives its keeper.
    #[track_caller]
    pub fn exec(&self, id: &str, name: &str, process: &Value) -> GuestProcess {
        let file = format!("/run/processes/{id}-{name}");
        self.write(&file, process);
        let spawn = Spawn::new(["cube-oci", "exec", "--process", &file, id, name]);
        self.vm.start(on_terminal(spawn, process))
    }
}

/// A keeper of a process with a terminal has one of its own.
fn on_terminal(spawn: Spawn, process: &Value) -> Spawn {
    match process["terminal"] == true {
        true => spawn.tty(WindowSize { rows: 31, cols: 97 }),
        false => spawn,
    }
}

/// A process that runs a line in a shell.
pub fn process(line: &str) -> Value {
    json!({
        "args": ["sh", "-c", line],
        "env": ["PATH=/bin", "COLOR=deep blue"],
        "cwd": "/",
        "user": { "uid": 0, "gid": 0 },
    })
}

/// What a container engine asks for by default, with a shell that runs a line.
pub fn spec(line: &str) -> Value {
    let names = ["CAP_CHOWN", "CAP_KILL", "CAP_MKNOD", "CAP_SETUID", "CAP_NET_BIND_SERVICE"];
    let mut process = process(line);
    process["capabilities"] = json!({ "bounding": names, "effective": names, "permitted": names });
    process["noNewPrivileges"] = json!(true);
    process["apparmorProfile"] = json!("cri-containerd.apparmor.d");
    let mount = |to: &str, kind: &str, options: &[&str]| json!({ "destination": to, "type": kind, "source": kind, "options": options });
    json!({
        "ociVersion": "1.2.0",
        "process": process,
        "root": { "path": "/run/tree" },
        "hostname": "box",
        "mounts": [
            mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            mount("/dev/pts", "devpts",
                &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
            mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777"]),
            mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
            mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
            mount("/run", "tmpfs", &["nosuid", "mode=755"]),
        ],
        "linux": {
            "cgroupsPath": "/kubepods/burstable/pod1/host-name",
            "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
            "namespaces": [
                { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
                { "type": "network", "path": "/var/run/netns/cni-of-the-host" },
            ],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
        "aFieldOfTheFuture": { "deep": [1, 2, 3] },
    })
}

/// The exit code of a keeper.
pub fn code(output: &Output) -> u8 {
    output.status.to_exit_code()
}

/// A keeper's end that is the program's own.
pub fn ended(code: u8) -> ExitStatus {
    ExitStatus::Code(code)
}
