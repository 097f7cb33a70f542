//! A sandbox: one VM, and the containers in it. It lasts from the first container's making to the
//! last one's removal, and knows at any time how they are without asking the guest.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use containerd_shim_protos::events::task::{TaskExit, TaskOOM};
use containerd_shim_protos::protobuf::MessageField;
use serde_json::Value;
use tokio::sync::{RwLock, watch};

use crate::cgroup::Group;
use crate::clock::{nanos, timestamp};
use crate::config::Config;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::ladder::{Ladder, Operation};
use crate::life::{Life, Phase, Step};
use crate::metrics::{self, Metrics};
use crate::network;
use crate::oci;
use crate::place::Place;
use crate::process::{End, Process};
use crate::record::{self, Identity};
use crate::sizing::Size;
use crate::sleep::{Bed, Doomed};
use crate::vm::Vm;
use crate::vmm::Vmm;
use crate::wishes::Wishes;

/// The exit status of what was killed, or whose VM is gone.
pub const KILLED: u32 = 137;
/// How long the end of a container's first process waits for the ends of the others to be told.
const OTHERS: Duration = Duration::from_secs(1);
/// How often it is looked whether the sandbox is still wanted.
const LOOK: Duration = Duration::from_secs(1);
/// How many looks in a row may find a VM without a container.
const EMPTY: u32 = 3;
/// How many, if there is no VM either: containerd may be slow to ask for the first container.
const UNBORN: u32 = 30;
/// Between two tries to ask a guest that lives and does not answer.
const PAUSE: Duration = Duration::from_millis(200);

/// A sandbox.
#[derive(Debug)]
pub struct Sandbox {
    /// The containerd namespace.
    pub namespace: String,
    /// Its own name.
    pub id: String,
    /// Where it is on the host.
    pub place: Place,
    /// What the operator says.
    pub config: Config,
    /// Where its events go.
    pub events: Events,
    /// How its calls have gone.
    pub metrics: Metrics,
    /// Its VM.
    pub life: Life<Arc<Vm>, Arc<Bed>>,
    /// Whoever talks to the guest for a purpose reads, so that it is not saved or ended in the midst
    /// of that; whoever does so writes.
    pub quiet: RwLock<()>,
    /// How many snapshots there have been.
    pub snapshots: AtomicU64,
    /// Whoever makes a VM holds it.
    pub booting: tokio::sync::Mutex<()>,
    wishes: Mutex<Wishes>,
    group: OnceLock<Group>,
    doomed: Mutex<Vec<Doomed>>,
    containers: Mutex<BTreeMap<String, Arc<Container>>>,
    over: watch::Sender<bool>,
}

impl Sandbox {
    /// An empty one, with no VM yet.
    pub fn new(
        namespace: &str,
        id: &str,
        place: Place,
        config: Config,
        events: Events,
    ) -> Arc<Self> {
        let wishes = Mutex::new(Wishes::new(&config));
        let metrics = Metrics::new(namespace, id, place.file(metrics::FILE));
        Arc::new(Self {
            namespace: namespace.to_owned(),
            id: id.to_owned(),
            place,
            config,
            events,
            metrics,
            life: Life::default(),
            quiet: RwLock::default(),
            snapshots: AtomicU64::default(),
            booting: tokio::sync::Mutex::default(),
            wishes,
            group: OnceLock::new(),
            doomed: Mutex::default(),
            containers: Mutex::default(),
            over: watch::Sender::new(false),
        })
    }

    fn containers(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Container>>> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All containers.
    pub fn all(&self) -> Vec<Arc<Container>> {
        self.containers().values().cloned().collect()
    }

    /// A container.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        let found = self.containers().get(id).cloned();
        found.ok_or_else(|| Error::NotFound(format!("task {id}")))
    }

    /// Takes the name of a new one.
    pub fn add(&self, container: &Arc<Container>) -> Result<()> {
        let mut containers = self.containers();
        if containers.contains_key(&container.id) {
            return Err(Error::Exists(format!("task {}", container.id)));
        }
        containers.insert(container.id.clone(), container.clone());
        Ok(())
    }

    /// Gives a name back.
    pub fn forget(&self, id: &str) {
        self.containers().remove(id);
    }

    /// What its pod asks for.
    pub fn wishes(&self) -> Wishes {
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes in what one more container asks for.
    pub fn wish(&self, spec: &Value) -> Result<()> {
        let mut wishes = self.wishes.lock().unwrap_or_else(PoisonError::into_inner);
        *wishes = wishes.clone().with(spec)?;
        Ok(())
    }

    /// This is to be taken from the guest when it goes on.
    pub fn doom(&self, doomed: Doomed) {
        let mut all = self.doomed.lock().unwrap_or_else(PoisonError::into_inner);
        if !all.contains(&doomed) {
            all.push(doomed);
        }
    }

    /// All that is, which is then no longer known here.
    pub fn take_doomed(&self) -> Vec<Doomed> {
        std::mem::take(&mut *self.doomed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The VM, if it has been booted, is still there and is not asleep.
    pub fn vm(&self) -> Result<Arc<Vm>> {
        if self.life.is_asleep() {
            return Err(Error::State(format!("sandbox {} is paused to disk", self.id)));
        }
        let vm = self.life.vm().filter(|vm| vm.lives());
        vm.ok_or_else(|| Error::NotFound(format!("the VM of sandbox {}", self.id)))
    }

    /// What stands for the VM's processes on the host.
    pub fn pid(&self) -> u32 {
        self.life.vm().map_or_else(std::process::id, |vm| vm.vmm.identity.pid)
    }

    /// The VM, booted now if this is the first container. A VM that is gone is not booted anew.
    pub async fn booted(&self, spec: &Value, ladder: &Ladder) -> Result<Arc<Vm>> {
        let _one = self.booting.lock().await;
        match self.life.now() {
            Phase::Unborn => {
                let vm = Arc::new(self.boot(spec, ladder).await?);
                self.life.take(&Step::Boot(vm.clone()))?;
                Ok(vm)
            }
            Phase::Awake(vm) | Phase::FallingAsleep(vm) if vm.lives() => {
                ladder.is(Operation::Add);
                Ok(vm)
            }
            Phase::Awake(vm) | Phase::FallingAsleep(vm) => {
                let how = vm.vmm.ended().borrow().clone().unwrap_or_default();
                Err(Error::State(format!("sandbox {} is over: {how}", self.id)))
            }
            Phase::Asleep(_) | Phase::Waking(_) => Err(Error::State(format!(
                "sandbox {} is paused to disk; resume it before a container is made in it",
                self.id
            ))),
            Phase::Over => Err(Error::State(format!("sandbox {} is over", self.id))),
        }
    }

    async fn boot(&self, spec: &Value, ladder: &Ladder) -> Result<Vm> {
        let size = Size::of(spec, &self.config)?;
        let network = match network::namespace(spec)? {
            Some(path) => network::connect(path).await?,
            None => network::wait_for_one().await?,
        };
        ladder.reach("network");
        let mut config = self.config.clone();
        let name = "cube.vm.kernel.path";
        if let Some(kernel) = spec["annotations"][name].as_str() {
            self.config.check_named(name, kernel.as_ref())?;
            config.kernel = kernel.into();
        }
        self.seat(spec)?;
        let vmm = Vmm::start(&config, &self.place, size, &network)?;
        self.write_down(Some(vmm.identity))?;
        ladder.reach("vmm");
        let vm = Vm::boot(vmm, &self.config, &self.place, Arc::new(network), ladder).await?;
        tracing::info!(cpus = size.cpus, memory_mib = size.memory_mib, "the VM is ready");
        Ok(vm)
    }

    /// Finds the control group for the VMs of this sandbox, and writes it down before it is made.
    pub fn seat(&self, spec: &Value) -> Result<()> {
        match Group::plan(spec, &self.place) {
            Ok(group) => drop(self.group.set(group)),
            Err(why) => tracing::warn!(why, "the VM has no control group of its own"),
        }
        self.write_down(None)
    }

    /// Writes down who runs here.
    pub fn write_down(&self, vmm: Option<Identity>) -> Result<()> {
        let me = Identity::of(std::process::id());
        let shim = me.ok_or_else(|| Error::Unavailable("/proc is not readable".to_owned()))?;
        let record = record::Sandbox {
            namespace: self.namespace.clone(),
            id: self.id.clone(),
            shim,
            vmm,
            group: self.group.get().cloned(),
        };
        record::write(&self.place.file(record::SANDBOX), &record)
    }

    /// Waits for the end of a process whose keeper runs, and tells it.
    pub fn watch(self: &Arc<Self>, container: &Arc<Container>, process: &Arc<Process>) {
        let (sandbox, container, process) = (self.clone(), container.clone(), process.clone());
        tokio::spawn(async move {
            let status = sandbox.exit_status(&process).await;
            sandbox.ended(&container, &process, status).await;
        });
    }

    async fn exit_status(&self, process: &Process) -> u32 {
        let Some(keeper) = process.keeper() else { return KILLED };
        loop {
            // As long as it sleeps it does not end.
            self.life.awake().await;
            let Ok(vm) = self.vm() else { return KILLED };
            match vm.guest.wait(keeper).await {
                Ok(status) => return status.to_exit_code().into(),
                Err(Error::NotFound(_)) => return KILLED,
                // The VM is about to be known as gone, or is paused.
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Tells the end of a process, unless that has been done.
    pub async fn ended(&self, container: &Arc<Container>, process: &Process, status: u32) {
        let first = process.name.exec.is_empty();
        if first {
            self.report_loss();
            self.report_memory(container, status).await;
            let others = container.execs().into_iter().filter(|exec| exec.has_started());
            let ends = async {
                for exec in others {
                    exec.wait().await;
                }
            };
            let _ = tokio::time::timeout(OTHERS, ends).await;
        }
        let end = End { status, at: SystemTime::now() };
        if !process.tell_end(end) {
            return;
        }
        let pid = process.pid();
        if first {
            let exit = record::Exit { status, unix_nanos: nanos(end.at), pid };
            if let Err(error) = record::write(&container.bundle.join(record::EXIT), &exit) {
                tracing::debug!(%error, "the bundle is gone");
            }
        }
        // What never ran has no end that anybody waits for.
        if process.has_started() {
            self.events.publish(&TaskExit {
                container_id: container.id.clone(),
                id: if first { container.id.clone() } else { process.name.exec.clone() },
                pid,
                exit_status: status,
                exited_at: MessageField::some(timestamp(end.at)),
                ..Default::default()
            });
        }
    }

    /// Says why, if the VM has ended under its containers.
    fn report_loss(&self) {
        if let Some(vm) = self.life.vm().filter(|vm| !vm.lives()) {
            let how = vm.vmm.ended().borrow().clone().unwrap_or_default();
            tracing::error!(how, last_words = vm.vmm.last_words(), "the VM is gone");
        }
    }

    /// Says so, if the container was killed for want of memory, before its end is told.
    async fn report_memory(&self, container: &Container, status: u32) {
        // Not necessarily its first process: a shell goes on, and ends with a code of its own.
        let Some(vm) = self.vm().ok().filter(|_| status != 0) else { return };
        if let Ok(state) = oci::state(&vm.guest, &container.inside).await
            && state.oom_killed
        {
            let container_id = container.id.clone();
            self.events.publish(&TaskOOM { container_id, ..Default::default() });
        }
    }

    /// Ends the VM and takes away all that the sandbox has on the host.
    pub async fn end(&self) {
        let vm = self.life.vm();
        // Cannot be refused.
        let _ = self.life.take(&Step::End);
        if let Some(vm) = vm {
            vm.vmm.kill().await;
        }
        // Also that of a VM that never came to be.
        if let Some(group) = self.group.get() {
            group.ended().await;
        }
        self.metrics.close();
        let place = self.place.clone();
        let cleared = tokio::task::spawn_blocking(move || place.clear()).await;
        if let Ok(Err(error)) = cleared {
            tracing::error!(%error, "the sandbox's folder is left");
        }
        self.over.send_replace(true);
    }

    /// Waits until [`Sandbox::end`] is done.
    pub async fn over(&self) {
        let mut over = self.over.subscribe();
        // Cannot fail while the sender, this sandbox, is there.
        let _ = over.wait_for(|over| *over).await;
    }

    /// Ends the sandbox when nobody can want it any more. containerd has taken the folders away that
    /// its containers were made from, `bundle` the first of them; or it has no container and none
    /// comes: containerd asks for the end then, unless it was killed before it could.
    pub fn watch_wanted(self: &Arc<Self>, bundle: PathBuf) {
        let sandbox = self.clone();
        tokio::spawn(async move {
            let mut empty = 0;
            loop {
                tokio::time::sleep(LOOK).await;
                let containers = sandbox.all();
                if !bundle.exists() && !containers.iter().any(|one| one.bundle.exists()) {
                    tracing::warn!(bundle = %bundle.display(), "the bundle is gone: the sandbox ends");
                    break;
                }
                empty = if containers.is_empty() { empty + 1 } else { 0 };
                let patience = if sandbox.life.vm().is_some() { EMPTY } else { UNBORN };
                if empty > patience {
                    tracing::warn!("there is no container, and none comes: the sandbox ends");
                    break;
                }
            }
            sandbox.end().await;
        });
    }
}
