//! A containerd that serves Kubernetes' CRI, a bridge for its pods, and `crictl` to talk to it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::artifacts::{Artifact, text};
use crate::containerd::{Containerd, Said, Serves};
use crate::{eventually, oci_image};

/// The namespace of containerd's that CRI uses.
const NAMESPACE: &str = "k8s.io";
/// The bridge of the pods, on the host.
const BRIDGE: &str = "cube-test-br0";
/// The host's address on it, and the pods' way out.
pub const HOST: &str = "10.95.0.1";
/// CRI's number for a namespace of the container's own, as Kubernetes asks for; 0 is the pod's.
const OWN: u8 = 1;
/// Where Debian has the network plugins.
pub const PLUGINS: &str = "/usr/lib/cni";

/// A containerd with CRI.
pub struct Cri {
    /// The daemon.
    pub containerd: Containerd,
    crictl: String,
}

/// A pod, by containerd's name for it, and what it was made of.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Its name.
    pub id: String,
    config: PathBuf,
}

impl Default for Cri {
    fn default() -> Self {
        Self::start()
    }
}

impl Cri {
    /// Starts one, with the images of [`oci_image`].
    ///
    /// # Panics
    /// If something is missing, with the command that makes it.
    pub fn start() -> Self {
        let crictl = Artifact::Crictl.arg();
        let containerd = Containerd::start_with(Serves::Cri, NAMESPACE);
        let this = Self { containerd, crictl };
        eventually("CRI serves", || this.call(["info"]).code == 0);
        this
    }

    /// Calls `crictl`.
    #[track_caller]
    pub fn call<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Said {
        self.call_with(b"", words)
    }

    /// Calls `crictl` with this input.
    #[track_caller]
    pub fn call_with<'a>(&self, input: &[u8], words: impl IntoIterator<Item = &'a str>) -> Said {
        let socket = format!("unix://{}", self.containerd.socket().display());
        let mut command = Command::new(&self.crictl);
        command.args(["--runtime-endpoint", &socket, "--image-endpoint", &socket]);
        command.args(["--timeout", "170s"]).args(words);
        Said::of(command, input)
    }

    /// Calls `crictl` for something that it answers in JSON.
    #[track_caller]
    pub fn ask<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Value {
        let said = self.call(words);
        let answer = serde_json::from_str(said.output(0));
        answer.unwrap_or_else(|error| panic!("{error} in {said:?}"))
    }

    /// The configuration of a pod; what `more` names replaces what it has.
    pub fn pod_config(&self, name: &str, more: &Value) -> PathBuf {
        let logs = self.containerd.folder(&format!("logs/{name}"));
        let mut config = json!({
            "metadata": {"name": name, "namespace": "default", "uid": name, "attempt": 0},
            "hostname": name,
            "log_directory": logs,
            "dns_config": {"servers": [HOST], "searches": ["pods.test"], "options": ["ndots:3"]},
            "linux": {},
        });
        merge(&mut config, more);
        self.write(&format!("pod-{name}.json"), &config)
    }

    fn write(&self, name: &str, config: &Value) -> PathBuf {
        let path = self.containerd.folder("configs").join(name);
        fs::write(&path, config.to_string()).unwrap();
        path
    }

    /// Tries to start a pod.
    #[track_caller]
    pub fn try_pod(&self, config: &Path) -> Said {
        self.call(["runp", "--runtime", "cube", &text(config)])
    }

    /// Starts a pod.
    #[track_caller]
    pub fn pod(&self, name: &str) -> Pod {
        self.pod_with(name, &json!({}))
    }

    /// Starts a pod whose configuration has this, too.
    #[track_caller]
    pub fn pod_with(&self, name: &str, more: &Value) -> Pod {
        let config = self.pod_config(name, more);
        let id = self.try_pod(&config).output(0).trim().to_owned();
        Pod { id, config }
    }

    /// Tries to make a container in a pod; what `more` names replaces what its configuration has.
    #[track_caller]
    pub fn try_container(&self, pod: &Pod, name: &str, command: &[&str], more: &Value) -> Said {
        let mut config = json!({
            "metadata": {"name": name, "attempt": 0},
            "image": {"image": oci_image::NAME},
            "command": command,
            "log_path": format!("{name}.log"),
            "linux": {"security_context": {"namespace_options": {"pid": OWN}}},
        });
        merge(&mut config, more);
        let config = self.write(&format!("container-{name}.json"), &config);
        self.call(["create", &pod.id, &text(&config), &text(&pod.config)])
    }

    /// Starts a container in a pod, and gives containerd's name for it.
    #[track_caller]
    pub fn container(&self, pod: &Pod, name: &str, command: &[&str]) -> String {
        self.container_with(pod, name, command, &json!({}))
    }

    /// Starts a container whose configuration has this, too.
    #[track_caller]
    pub fn container_with(&self, pod: &Pod, name: &str, command: &[&str], more: &Value) -> String {
        let id = self.try_container(pod, name, command, more).output(0).trim().to_owned();
        self.call(["start", &id]).output(0);
        id
    }

    /// Runs a command in a container. Of one that fails there is no output, but an error with its
    /// code and what it said.
    #[track_caller]
    pub fn exec(&self, container: &str, command: &[&str]) -> Said {
        let words = ["exec", "--sync", container];
        let mut said = self.call(words.into_iter().chain(command.iter().copied()));
        // `crictl` ends each of the two streams with a line's end of its own.
        if let Some(output) = said.stdout.strip_suffix("\n\n") {
            said.stdout = output.to_owned();
        }
        said
    }

    /// The address of a pod.
    #[track_caller]
    pub fn address(&self, pod: &Pod) -> String {
        let answer = self.ask(["inspectp", &pod.id]);
        answer["status"]["network"]["ip"].as_str().unwrap_or_default().to_owned()
    }

    /// What is known of a container.
    #[track_caller]
    pub fn status(&self, container: &str) -> Value {
        self.ask(["inspect", container])["status"].clone()
    }

    /// Waits for the end of a container.
    #[track_caller]
    pub fn ended(&self, container: &str) -> Value {
        eventually("the container has ended", || {
            self.status(container)["state"] == "CONTAINER_EXITED"
        });
        self.status(container)
    }

    /// Ends a pod and removes it.
    #[track_caller]
    pub fn remove(&self, pod: &Pod) {
        self.call(["stopp", &pod.id]).output(0);
        self.call(["rmp", &pod.id]).output(0);
    }

    /// The network namespaces that plugins have made.
    pub fn network_namespaces() -> Vec<String> {
        let entries = fs::read_dir("/var/run/netns").into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("cni-")).collect()
    }
}

impl Drop for Cri {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(Self::network_namespaces(), [""; 0], "left behind");
        }
        remove_bridge();
    }
}

/// Removes the pods' bridge; it is not there if no pod was.
pub fn remove_bridge() {
    let _ = Command::new("ip").args(["link", "delete", BRIDGE]).output();
}

fn merge(into: &mut Value, more: &Value) {
    for (name, value) in more.as_object().into_iter().flatten() {
        into[name] = value.clone();
    }
}

/// Writes what the plugins shall do into `cni` in a folder.
///
/// # Panics
/// If they are not installed.
pub fn write_network(folder: &Path) -> PathBuf {
    assert!(
        Path::new(PLUGINS).join("bridge").exists(),
        "no network plugins: apt-get install containernetworking-plugins"
    );
    let cni = folder.join("cni");
    fs::create_dir_all(&cni).unwrap();
    let network = json!({
        "cniVersion": "0.4.0",
        "name": "cube-test",
        "plugins": [{
            "type": "bridge",
            "bridge": BRIDGE,
            "isGateway": true,
            "ipMasq": false,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": folder.join("addresses"),
                "ranges": [[{"subnet": "10.95.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }],
    });
    fs::write(cni.join("10-cube-test.conflist"), network.to_string()).unwrap();
    cni
}

/// The part of containerd's settings that is about CRI, for the version of them that all
/// containerds understand. Writes the network's, too.
pub(crate) fn settings(folder: &Path) -> String {
    let cni = write_network(folder);
    let lines = [
        "[plugins.\"io.containerd.grpc.v1.cri\"]".to_owned(),
        format!("  sandbox_image = {:?}", oci_image::PAUSE),
        "  restrict_oom_score_adj = true".to_owned(),
        "  disable_apparmor = true".to_owned(),
        "  stream_server_address = \"127.0.0.1\"".to_owned(),
        "[plugins.\"io.containerd.grpc.v1.cri\".cni]".to_owned(),
        format!("  bin_dir = {PLUGINS:?}"),
        format!("  conf_dir = {:?}", text(&cni)),
        "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cube]".to_owned(),
        "  runtime_type = \"io.containerd.cube.v2\"".to_owned(),
        "  privileged_without_host_devices = true".to_owned(),
        "  pod_annotations = [\"cube.*\"]".to_owned(),
        "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]".to_owned(),
        "  runtime_type = \"io.containerd.runc.v2\"".to_owned(),
    ];
    lines.join("\n") + "\n"
}
