//! Checkpoints: a sandbox is written to a folder, and others go on from it, each as another machine.
//!
//! ```text
//! DIR/vm/        the VM's snapshot, as `cube-vmm snapshot` writes it
//! DIR/pod.json   what this shim has to know of the containers in it; written last
//! ```
//!
//! A container that goes on from a checkpoint has the name in the guest that it had there. Its root
//! and its volumes are those of its own spec, and stand where the guest knows them: what has the same
//! name is the same file to it.

mod plan;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use containerd_shim_protos::api::CheckpointTaskRequest;
use guest_protocol::{ProcessId, Stream};
use hypervisor::api::{Reply, Request, SnapshotRequest};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::plan::Plan;
use self::plan::make_folder;
use crate::config::Config;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::ladder::Ladder;
use crate::life::{Phase, Step};
use crate::lifecycle::New;
use crate::network::{self, Network};
use crate::sandbox::Sandbox;
use crate::sleep::to_its_end;
use crate::spec::{self, Adapted};
use crate::stdio::Stdio;
use crate::vm::{Copy, Vm};
use crate::vmm::Vmm;
use crate::{annotations, oci, record};

/// The annotation of a container that goes on from the checkpoint in this folder.
const FROM: &str = "cube.restore.from";
/// Which of its containers that is, if there are several.
const CONTAINER: &str = "cube.restore.container";
/// The same in Cubelet's words.
const THEIRS: &str = "cube.appsnapshot.container.id";
/// The file that makes a folder a checkpoint.
const POD: &str = "pod.json";
/// The VM's part of it.
const VM: &str = "vm";
/// The version of [`Pod`] that is written, and the only one that is read.
const VERSION: u32 = 1;
/// Longest host name that a kernel takes.
const MAX_HOSTNAME: usize = 63;

/// The containers of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Pod {
    version: u32,
    containers: Vec<Saved>,
    /// The names of its network cards.
    cards: Vec<String>,
}

/// A container in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// Its name in the guest.
    pub id: String,
    /// Its first process's keeper.
    pub keeper: ProcessId,
    /// Whether that has been started.
    pub started: bool,
    terminal: bool,
    stdin: bool,
    stdout: bool,
    stderr: bool,
    /// Where its volumes are mounted, in their order.
    volumes: Vec<String>,
}

impl Saved {
    /// Whether its first process has this stream.
    pub fn has(&self, stream: Stream) -> bool {
        match stream {
            Stream::Stdin => self.stdin,
            Stream::Stdout => self.stdout,
            Stream::Stderr => self.stderr,
        }
    }

    fn of(container: &Container, share: &Path) -> Option<Self> {
        let (init, stdio) = (&container.init, &container.init.stdio);
        let spec: Value = record::read(&share.join("config.json"))?;
        Some(Self {
            id: container.inside.clone(),
            keeper: init.keeper()?,
            started: init.has_started(),
            terminal: stdio.terminal,
            stdin: stdio.has(Stream::Stdin),
            stdout: stdio.has(Stream::Stdout),
            stderr: stdio.has(Stream::Stderr),
            volumes: spec::volumes_inside(&spec),
        })
    }

    /// Refuses a container that cannot be this one.
    fn check(&self, stdio: &Stdio, adapted: &Adapted) -> Result<()> {
        if self.terminal != stdio.terminal {
            let (was, is) = if self.terminal { ("a", "no") } else { ("no", "a") };
            return Err(Error::Invalid(format!(
                "the container in the checkpoint has {was} terminal, and task {is} terminal"
            )));
        }
        let volumes = spec::volumes_inside(&adapted.spec);
        if volumes != self.volumes {
            return Err(Error::Invalid(format!(
                "the container has volumes at {volumes:?}, and in the checkpoint at {:?}; they must \
                 be the same, in the same order",
                self.volumes
            )));
        }
        Ok(())
    }
}

/// What a new container goes on from.
#[derive(Clone, Debug)]
pub struct Origin {
    folder: PathBuf,
    cards: Vec<String>,
    /// The container in it.
    pub saved: Saved,
}

impl Origin {
    /// That of a new container, if it has one: by its annotation, or what containerd says.
    pub fn of(spec: &Value, checkpoint: &str, config: &Config) -> Result<Option<Self>> {
        let annotation = |name: &str| spec["annotations"][name].as_str();
        let theirs = annotations::app_snapshot(spec)?;
        let named = annotation(FROM).map(str::to_owned).or(theirs).map(PathBuf::from);
        if let Some(named) = &named {
            config.check_named(FROM, named)?;
        }
        let told = Some(checkpoint).filter(|path| !path.is_empty()).map(PathBuf::from);
        let Some(folder) = named.or(told) else { return Ok(None) };
        let path = folder.join(POD);
        let refused = |why: String| Error::Invalid(format!("{}: {why}", path.display()));
        let text = std::fs::read(&path)
            .map_err(|error| refused(format!("this is no checkpoint: {error}")))?;
        let pod: Pod = serde_json::from_slice(&text).map_err(|error| refused(error.to_string()))?;
        if pod.version != VERSION {
            let version = pod.version;
            return Err(refused(format!("a checkpoint of version {version}, expected {VERSION}")));
        }
        let names = pod.containers.iter().map(|saved| saved.id.as_str()).collect::<Vec<_>>();
        let wanted = annotation(CONTAINER).or_else(|| annotation(THEIRS));
        let saved = match (wanted, pod.containers.as_slice()) {
            (None, [only]) => only.clone(),
            (Some(wanted), [only]) if only.id == wanted => only.clone(),
            (_, [_]) => {
                return Err(refused(format!("no container {wanted:?} is in it, but {names:?}")));
            }
            _ => {
                return Err(refused(format!(
                    "it has the containers {names:?}; only one that has a single container can be \
                     gone on from"
                )));
            }
        };
        crate::bootstrap::check_name("container in the checkpoint", &saved.id)?;
        Ok(Some(Self { folder, cards: pod.cards, saved }))
    }

    fn check_cards(&self, network: &Network) -> Result<()> {
        let names: Vec<&str> = network.cards.iter().map(|card| card.name.as_str()).collect();
        if names == self.cards {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "the pod has the network interfaces {names:?}, and in the checkpoint {:?}; they must be \
             the same",
            self.cards
        )))
    }
}

/// The host name of a copy: what its spec says, or its own name.
fn hostname(spec: &Value, id: &str) -> String {
    let given = spec["hostname"].as_str().filter(|name| !name.is_empty());
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    let name: String = given.unwrap_or(id).chars().map(plain).take(MAX_HOSTNAME).collect();
    name.trim_end_matches(['-', '.']).to_owned()
}

/// Whether a container shall end with its checkpoint: the first field of runc's options for it.
pub fn ends_with_it(request: &CheckpointTaskRequest) -> bool {
    let options = request.options.as_ref();
    options.is_some_and(|options| options.value.starts_with(&[8, 1]))
}

impl Sandbox {
    /// Writes all of the sandbox into a folder, and goes on.
    pub async fn checkpoint(self: &Arc<Self>, folder: PathBuf) -> Result<()> {
        let sandbox = self.clone();
        to_its_end(async move { sandbox.write_checkpoint(&folder).await }).await
    }

    async fn write_checkpoint(&self, folder: &Path) -> Result<()> {
        if !folder.is_absolute() {
            let folder = folder.display();
            return Err(Error::Invalid(format!("{folder:?} is not an absolute path")));
        }
        let _quiet = self.quiet.write().await;
        let vm = self.vm()?;
        make_folder(folder)?;
        let frozen = self.frozen()?;
        let Some(frozen) = frozen else { return self.write_running(&vm, folder).await };
        // containerd pauses what it wants a checkpoint of. A guest that stands still lets go of
        // nothing, so it goes on for the moment of it.
        vm.vmm.ask(&Request::Resume {}).await?;
        let written = self.write_running(&vm, folder).await;
        if let Err(error) = vm.vmm.ask(&Request::Pause {}).await {
            tracing::error!(%error, "it is no longer paused after its checkpoint");
            frozen.set_paused(false);
        }
        written
    }

    /// Makes a folder for a checkpoint that is about to be written. Refuses one that has something in
    /// the places of its parts, which would be lost if it failed.
    pub fn plan_checkpoint(&self, folder: &Path) -> Result<Plan> {
        let pod = self.pod(&*self.vm()?);
        Plan::make(folder, pod)
    }

    /// The container that is paused with its VM.
    fn frozen(&self) -> Result<Option<Arc<Container>>> {
        let all = self.all();
        let Some(frozen) = all.iter().find(|container| container.is_paused()) else {
            return Ok(None);
        };
        if all.len() == 1 {
            return Ok(Some(frozen.clone()));
        }
        let id = &frozen.id;
        Err(Error::State(format!("task {id} of a pod is paused; resume it for a checkpoint")))
    }

    async fn write_running(&self, vm: &Vm, folder: &Path) -> Result<()> {
        let pod = self.pod(vm);
        vm.answers(&self.wishes()).await?;
        self.save_running(vm, folder.join(VM)).await?;
        record::write(&folder.join(POD), &pod)
    }

    fn pod(&self, vm: &Vm) -> Pod {
        let saved = |container: &Arc<Container>| {
            Saved::of(container, &self.place.container(&container.inside))
        };
        let alive = self.all().into_iter().filter(|container| container.init.end().is_none());
        Pod {
            version: VERSION,
            containers: alive.filter_map(|container| saved(&container)).collect(),
            cards: vm.network().cards.iter().map(|card| card.name.clone()).collect(),
        }
    }

    /// Streams are let go of for it: those of a copy are others.
    async fn save_running(&self, vm: &Vm, snapshot: PathBuf) -> Result<()> {
        let let_go = self.let_go(vm).await;
        let saved = match let_go {
            Ok(()) => {
                let request = Request::Snapshot(SnapshotRequest::new(snapshot));
                vm.vmm.ask_long(&request).await
            }
            Err(error) => Err(error),
        };
        self.take_up(vm).await;
        match saved? {
            Reply::Saved(report) => {
                tracing::info!(
                    stood_still_us = report.paused_us,
                    us = report.total_us,
                    bytes = report.memory_bytes,
                    "a checkpoint is written"
                );
                Ok(())
            }
            other => Err(Error::Unavailable(format!("the VMM answered {other:?}"))),
        }
    }

    /// Makes a container that goes on from a checkpoint.
    pub async fn make_copy(
        self: &Arc<Self>,
        container: &Arc<Container>,
        spec: Value,
        new: &New,
        origin: &Origin,
        ladder: &Ladder,
    ) -> Result<()> {
        let _one = self.booting.lock().await;
        if !matches!(self.life.now(), Phase::Unborn) {
            return Err(Error::State(format!(
                "sandbox {} has a VM; only its first container can go on from a checkpoint",
                self.id
            )));
        }
        let folder = new.bundle.join(spec["root"]["path"].as_str().unwrap_or("rootfs"));
        let adapted = spec::adapt(spec.clone(), &container.inside)?;
        origin.saved.check(&new.stdio, &adapted)?;
        self.wish(&spec)?;
        // The guest has its files open: they are there before it is.
        self.lay_out(container, new.rootfs.clone(), folder, adapted).await?;
        ladder.reach("files");
        let network = match network::namespace(&spec)? {
            Some(path) => network::connect(path).await?,
            // A checkpoint of earlier releases has none.
            None if origin.cards.is_empty() => Network::default(),
            None => network::wait_for_one().await?,
        };
        origin.check_cards(&network)?;
        ladder.reach("network");
        let copy = Copy {
            hostname: hostname(&spec, &container.id),
            container: container.inside.clone(),
            wishes: self.wishes(),
        };
        let snapshot = origin.folder.join(VM);
        self.seat(&spec)?;
        let vmm = Vmm::copy(&self.config, &self.place, &snapshot, &network, &copy.hostname)?;
        self.write_down(Some(vmm.identity))?;
        ladder.reach("vmm");
        let network = Arc::new(network);
        let vm = Vm::copied(vmm, &self.config, &self.place, network, &copy, ladder).await?;
        let vm = Arc::new(vm);
        self.life.take(&Step::Boot(vm.clone()))?;
        container.init.adopt(&vm.guest, &origin.saved).await?;
        container.init.set_pid(vm.vmm.identity.pid);
        self.watch(container, &container.init);
        ladder.reach("container");
        tracing::info!(from = %origin.folder.display(), "a VM goes on from a checkpoint");
        Ok(())
    }

    /// Starts the first process of a copy, which may run already.
    pub async fn start_copy(&self, vm: &Vm, container: &Container, saved: &Saved) -> Result<()> {
        if saved.has(Stream::Stdin) {
            container.init.connect_input(&vm.guest).await?;
        }
        if saved.started {
            return Ok(());
        }
        oci::start(&vm.guest, &container.inside).await
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn saved(id: &str) -> Value {
        json!({
            "id": id, "keeper": 3, "started": true, "terminal": false,
            "stdin": false, "stdout": true, "stderr": true, "volumes": ["/data"],
        })
    }

    fn origin(pod: &Value, annotations: &Value) -> Result<Option<Origin>> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(POD), pod.to_string()).unwrap();
        let mut annotations = annotations.clone();
        annotations[FROM] = json!(dir.path());
        let config = Config { annotation_dirs: vec![dir.path().into()], ..Config::default() };
        Origin::of(&json!({"annotations": annotations}), "", &config)
    }

    #[test]
    fn a_container_without_a_checkpoint_has_none() {
        let config = Config::default();
        assert!(Origin::of(&json!({}), "", &config).unwrap().is_none());
        let missing = Origin::of(&json!({}), "/nonexistent", &config).unwrap_err().to_string();
        assert!(missing.contains("/nonexistent/pod.json: this is no checkpoint"), "{missing}");
    }

    #[test]
    fn an_annotation_names_files_of_the_operator_s_folders_only() {
        let dir = tempfile::tempdir().unwrap();
        let spec = json!({"annotations": {FROM: dir.path()}});
        let error = Origin::of(&spec, "", &Config::default()).unwrap_err().to_string();
        assert!(error.contains("is not below [\"/var/lib/cube\"]"), "{error}");
    }

    #[test]
    fn the_only_container_of_a_checkpoint_need_not_be_named() {
        let pod = json!({"version": 1, "containers": [saved("web")], "cards": ["eth0"]});
        assert_eq!(origin(&pod, &json!({})).unwrap().unwrap().saved.id, "web");
        assert!(origin(&pod, &json!({CONTAINER: "web"})).is_ok());
        let other = origin(&pod, &json!({CONTAINER: "db"})).unwrap_err().to_string();
        assert!(other.contains("\"db\"") && other.contains("web"), "{other}");
    }

    #[test]
    fn what_cannot_be_gone_on_from_is_refused_with_the_cause() {
        let two = json!({"version": 1, "containers": [saved("a"), saved("b")], "cards": []});
        let error = origin(&two, &json!({})).unwrap_err().to_string();
        assert!(error.contains("[\"a\", \"b\"]"), "{error}");
        let newer = json!({"version": 2, "containers": [saved("a")], "cards": []});
        let error = origin(&newer, &json!({})).unwrap_err().to_string();
        assert!(error.contains("version 2, expected 1"), "{error}");
        let path = json!({"version": 1, "containers": [saved("../a")], "cards": []});
        assert!(origin(&path, &json!({})).is_err());
    }

    #[test]
    fn other_volumes_or_another_terminal_are_refused() {
        let saved: Saved = serde_json::from_value(saved("web")).unwrap();
        let spec = |at: &str| {
            let mounts = json!([{"destination": at, "type": "bind", "source": "/srv"}]);
            spec::adapt(json!({"process": {"args": ["x"]}, "mounts": mounts}), "web").unwrap()
        };
        saved.check(&Stdio::default(), &spec("/data")).unwrap();
        let error = saved.check(&Stdio::default(), &spec("/other")).unwrap_err().to_string();
        assert!(error.contains("/other") && error.contains("/data"), "{error}");
        let terminal = Stdio { terminal: true, ..Default::default() };
        assert!(saved.check(&terminal, &spec("/data")).is_err());
    }

    #[test]
    fn a_copy_has_a_host_name_of_its_own() {
        assert_eq!(hostname(&json!({"hostname": "given"}), "id"), "given");
        assert_eq!(hostname(&json!({}), "a_copy.1"), "a-copy.1");
        assert_eq!(hostname(&json!({}), &"x".repeat(70)).len(), 63);
    }

    #[test]
    fn only_the_option_to_end_ends_it() {
        let mut request = CheckpointTaskRequest::new();
        assert!(!ends_with_it(&request));
        request.options.mut_or_insert_default().value = vec![8, 1];
        assert!(ends_with_it(&request));
    }
}
