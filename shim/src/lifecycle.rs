//! What is done to containers and their processes. Each of these either does it all or leaves
//! things as they were.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::types::mount::Mount;
use containerd_shim_protos::types::task::Status;
use serde_json::Value;
use tokio::task::spawn_blocking;

use crate::checkpoint::Origin;
use crate::container::Container;
use crate::error::{Error, Result, io};
use crate::ladder::{Ladder, Operation};
use crate::process::{End, Process};
use crate::rootfs::{self, Root};
use crate::sandbox::{KILLED, Sandbox};
use crate::sleep::Doomed;
use crate::spec::{self, Adapted};
use crate::stdio::Stdio;
use crate::vm::Vm;
use crate::{annotations, bootstrap, oci, record};

/// How long a container that is deleted before it ran may take to end.
const ENDING: Duration = Duration::from_secs(5);

/// What a new container is made of.
#[derive(Clone, Debug)]
pub struct New {
    /// Its name.
    pub id: String,
    /// containerd's folder for it.
    pub bundle: PathBuf,
    /// Its root.
    pub rootfs: Vec<Mount>,
    /// Its first process's streams.
    pub stdio: Stdio,
    /// The folder with the checkpoint that it goes on from, if containerd names one.
    pub checkpoint: String,
}

/// Refuses a signal that cannot be sent.
fn check_killable(container: &Container, process: &Process, kill: bool) -> Result<()> {
    if process.end().is_some() {
        return Err(Error::NotFound(format!("process already finished: {}", process.name)));
    }
    if container.is_paused() && !kill {
        return Err(Error::State(format!(
            "task {} is paused: it gets no signal but SIGKILL",
            container.id
        )));
    }
    Ok(())
}

/// Reads the spec in a bundle.
pub fn read_spec(bundle: &Path) -> Result<Value> {
    let path = bundle.join("config.json");
    let text = std::fs::read(&path).map_err(io(format!("read {}", path.display())))?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::Invalid(format!("{} is not a spec: {error}", path.display())))
}

impl Sandbox {
    /// Makes a container, ready to be started.
    pub async fn create(self: &Arc<Self>, new: New) -> Result<Arc<Container>> {
        let (ladder, id) = (Ladder::begin(Operation::Create), new.id.clone());
        let made = self.make_new(new, &ladder).await;
        self.tell_ladder(&id, &ladder, &made);
        made
    }

    async fn make_new(self: &Arc<Self>, new: New, ladder: &Ladder) -> Result<Arc<Container>> {
        bootstrap::check_name("container", &new.id)?;
        new.stdio.check()?;
        let spec = read_spec(&new.bundle)?;
        let _quiet = self.quiet.read().await;
        annotations::check(&spec)?;
        let origin = Origin::of(&spec, &new.checkpoint, &self.config)?;
        let mut container = Container::new(&new.id, new.bundle.clone(), new.stdio.clone());
        if let Some(origin) = &origin {
            ladder.is(Operation::Restore);
            container.goes_on_from(origin.saved.clone());
        }
        let container = Arc::new(container);
        self.add(&container)?;
        let changing = container.changing.lock().await;
        ladder.reach("spec");
        let made = match &origin {
            Some(origin) => self.make_copy(&container, spec, &new, origin, ladder).await,
            None => self.make(&container, spec, &new, ladder).await,
        };
        if made.is_err() {
            self.unmake(&container).await;
            self.forget(&container.id);
        }
        drop(changing);
        made.map(|()| container)
    }

    async fn make(
        self: &Arc<Self>,
        container: &Arc<Container>,
        spec: Value,
        new: &New,
        ladder: &Ladder,
    ) -> Result<()> {
        let folder = new.bundle.join(spec["root"]["path"].as_str().unwrap_or("rootfs"));
        let adapted = spec::adapt(spec.clone(), &container.inside)?;
        self.wish(&spec)?;
        // Files are mounted while the guest boots. Both are waited for even if one fails: what is
        // mounted later would be left.
        let (vm, laid_out) = tokio::join!(
            self.booted(&spec, ladder),
            ladder.beside("files", self.lay_out(container, new.rootfs.clone(), folder, adapted))
        );
        laid_out?;
        let vm = vm?;
        ladder.reach("rest_of_files");
        container.init.launch(&vm.guest, oci::create(&container.inside)).await?;
        let state = oci::created(&vm.guest, &container.inside, "").await?;
        if state.status != "created" {
            let (id, status) = (&container.id, state.status);
            return Err(Error::State(format!("task {id} is {status} after it was made")));
        }
        container.init.set_pid(vm.vmm.identity.pid);
        self.watch(container, &container.init);
        ladder.reach("container");
        Ok(())
    }

    /// Puts its files where the guest sees them.
    pub async fn lay_out(
        &self,
        container: &Container,
        mounts: Vec<Mount>,
        folder: PathBuf,
        adapted: Adapted,
    ) -> Result<()> {
        let (place, id) = (self.place.clone(), container.inside.clone());
        let work = move || {
            let root = Root { mounts: &mounts, folder: &folder };
            rootfs::lay_out(&place, &id, &root, &adapted)
        };
        spawn_blocking(work).await.map_err(|error| Error::Unavailable(error.to_string()))?
    }

    /// Takes away what the guest and the host have of a container.
    async fn unmake(&self, container: &Container) {
        if self.life.is_asleep() {
            self.doom(Doomed { container: container.inside.clone(), exec: String::new() });
        }
        if let Ok(vm) = self.vm()
            && let Err(error) = oci::delete(&vm.guest, &container.inside).await
        {
            tracing::warn!(%error, id = container.id, "a container is left in the guest");
        }
        self.clear(container).await;
    }

    /// Takes away what the host has of it.
    async fn clear(&self, container: &Container) {
        let (place, id) = (self.place.clone(), container.inside.clone());
        if let Ok(Err(error)) = spawn_blocking(move || place.clear_container(&id)).await {
            tracing::error!(%error, id = container.id, "a container's files are left");
        }
    }

    /// Lets a process run that was made or added.
    pub async fn start(
        self: &Arc<Self>,
        container: &Arc<Container>,
        process: &Arc<Process>,
    ) -> Result<()> {
        let changing = container.changing.lock().await;
        let _quiet = self.quiet.read().await;
        let vm = self.running_vm(container)?;
        process.start()?;
        let exec = process.name.exec.as_str();
        let started = if exec.is_empty() {
            self.start_first(&vm, container).await
        } else {
            self.start_exec(&vm, container, process).await
        };
        drop(changing);
        if started.is_err() {
            process.not_started();
        }
        started
    }

    async fn start_first(&self, vm: &Vm, container: &Container) -> Result<()> {
        // The others of a pod come when it has its network.
        if container.id == self.id {
            vm.take_network().await?;
        }
        if let Some(saved) = &container.copy_of {
            return self.start_copy(vm, container, saved).await;
        }
        container.init.connect_input(&vm.guest).await?;
        oci::start(&vm.guest, &container.inside).await
    }

    async fn start_exec(&self, vm: &Vm, container: &Container, process: &Process) -> Result<()> {
        let (id, exec) = (container.inside.as_str(), process.name.exec.as_str());
        process.launch(&vm.guest, oci::exec(id, exec)).await?;
        process.connect_input(&vm.guest).await?;
        oci::created(&vm.guest, id, exec).await.map(drop)
    }

    /// The VM, for what cannot be done while it stands still.
    fn running_vm(&self, container: &Container) -> Result<Arc<Vm>> {
        if container.is_paused() {
            return Err(Error::State(format!("task {} is paused", container.id)));
        }
        self.vm()
    }

    /// Adds a process to a container; [`Sandbox::start`] starts it.
    pub async fn exec(&self, id: &str, exec: &str, stdio: Stdio, spec: &[u8]) -> Result<()> {
        bootstrap::check_name("exec id", exec)?;
        stdio.check()?;
        let container = self.container(id)?;
        let spec: Value = serde_json::from_slice(spec)
            .map_err(|error| Error::Invalid(format!("the spec of exec {exec}: {error}")))?;
        let process = container.add(exec, stdio)?;
        let path = self.place.container(&container.inside).join(oci::exec_file(exec));
        let written = record::write(&path, &spec);
        if written.is_err() {
            container.forget(exec);
        } else {
            process.set_pid(self.pid());
        }
        written
    }

    /// Sends a signal. Whatever is paused, dead or not answering can be killed.
    pub async fn kill(
        self: &Arc<Self>,
        container: &Arc<Container>,
        process: &Arc<Process>,
        signal: u32,
        all: bool,
    ) -> Result<()> {
        let kill = signal == libc::SIGKILL.unsigned_abs();
        if process.pid() == 0 {
            // It is being made. What comes of that is killed, not what is not there yet.
            drop(container.changing.lock().await);
        }
        let mut quiet = self.quiet.read().await;
        while self.life.is_asleep() {
            drop(quiet);
            let alone = self.quiet.write().await;
            // It may have been resumed meanwhile.
            if self.life.is_asleep() {
                check_killable(container, process, kill)?;
                return self.kill_asleep(container, process).await;
            }
            drop(alone);
            quiet = self.quiet.read().await;
        }
        check_killable(container, process, kill)?;
        if container.is_paused() {
            return self.kill_paused(container).await;
        }
        let vm = self.vm()?;
        let exec = process.name.exec.as_str();
        let sent = oci::kill(&vm.guest, &container.inside, exec, signal, all);
        if !kill || !exec.is_empty() {
            return sent.await;
        }
        let sent = self.unless_hung(&vm, container, sent).await;
        self.watch_killed(&vm, container);
        match sent {
            // A guest that does not answer has nothing that could be kept.
            Err(Error::Unavailable(why)) if self.is_alone(container) => {
                tracing::warn!(why, "the guest does not answer: the VM is killed");
                vm.vmm.kill().await;
                Ok(())
            }
            done => done,
        }
    }

    /// Whether there is no other container in it.
    pub fn is_alone(&self, container: &Container) -> bool {
        self.all().iter().all(|other| other.id == container.id)
    }

    /// A VM that stands still cannot end a process: it goes itself, if it is this container's
    /// alone, or goes on for that.
    async fn kill_paused(&self, container: &Container) -> Result<()> {
        let vm = self.vm()?;
        if self.is_alone(container) {
            vm.vmm.kill().await;
        } else {
            oci::kill(&vm.guest, &container.inside, "", libc::SIGKILL.unsigned_abs(), true).await?;
            oci::resume(&vm.guest, &container.inside).await?;
        }
        container.set_paused(false);
        Ok(())
    }

    /// Changes the limits of a container.
    pub async fn update(&self, container: &Container, resources: &[u8]) -> Result<()> {
        let resources: Value = serde_json::from_slice(resources)
            .map_err(|error| Error::Invalid(format!("the resources: {error}")))?;
        let _quiet = self.quiet.read().await;
        let vm = self.running_vm(container)?;
        let name = "resources.json";
        record::write(&self.place.container(&container.inside).join(name), &resources)?;
        oci::update(&vm.guest, &container.inside, name).await
    }

    /// Takes a container away that has ended or never ran, and tells how it has ended.
    pub async fn delete(&self, container: &Arc<Container>) -> Result<End> {
        let _changing = container.changing.lock().await;
        let _quiet = self.quiet.read().await;
        match container.status(&container.init) {
            Status::STOPPED => {}
            Status::CREATED => self.end_created(container).await?,
            status => {
                let status = format!("{status:?}").to_lowercase();
                let id = &container.id;
                return Err(Error::State(format!("cannot delete a {status} process: task {id}")));
            }
        }
        for process in container.execs().iter().chain([&container.init]) {
            process.drain().await;
        }
        if self.is_alone(container) {
            // Its VM is about to go: the guest, which may hang, need not be asked.
            self.clear(container).await;
        } else {
            self.unmake(container).await;
        }
        self.forget(&container.id);
        let lost = End { status: 255, at: SystemTime::now() };
        Ok(container.init.end().unwrap_or(lost))
    }

    async fn end_created(&self, container: &Arc<Container>) -> Result<()> {
        if self.life.is_asleep() {
            self.ended(container, &container.init, KILLED).await;
            return Ok(());
        }
        if let Ok(vm) = self.vm() {
            let signal = libc::SIGKILL.unsigned_abs();
            let sent = oci::kill(&vm.guest, &container.inside, "", signal, true);
            self.unless_hung(&vm, container, sent).await?;
            self.watch_killed(&vm, container);
        }
        let ended = tokio::time::timeout(ENDING, container.init.wait()).await;
        ended.map(drop).map_err(|_| {
            Error::Unavailable(format!("task {} was killed and does not end", container.id))
        })
    }

    /// Forgets a process that was added and has ended or was never started.
    pub async fn delete_exec(&self, container: &Container, process: &Process) -> Result<End> {
        let status = container.status(process);
        if !matches!(status, Status::STOPPED | Status::CREATED) {
            let status = format!("{status:?}").to_lowercase();
            return Err(Error::State(format!(
                "cannot delete a {status} process: {}",
                process.name
            )));
        }
        process.drain().await;
        let _quiet = self.quiet.read().await;
        if let Ok(vm) = self.running_vm(container)
            && let Err(error) = oci::forget(&vm.guest, &container.inside, &process.name.exec).await
        {
            tracing::warn!(%error, process = %process.name, "a process's record is left in the guest");
        }
        container.forget(&process.name.exec);
        let path = self.place.container(&container.inside).join(oci::exec_file(&process.name.exec));
        let _ = std::fs::remove_file(path);
        Ok(process.end().unwrap_or(End { status: 0, at: SystemTime::now() }))
    }
}
