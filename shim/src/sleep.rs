//! Pauses. In place, a VM stands still with all its memory, or the processes of one of its containers
//! do; to disk, its state is written to a folder and the VM goes, for all containers of the pod.
//!
//! To fall asleep: the guest lets go of the streams, its state is written, and only when all of it is
//! on the disk the VM is ended. To wake: a VM is made of the state, and only when its agent, and what
//! else the pod wishes, has answered, the state is removed. Whatever fails on the way, the VM runs on
//! or the state is kept, and the error says why.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use containerd_shim_protos::events::task::{TaskPaused, TaskResumed};
use containerd_shim_protos::types::task::Status;
use hypervisor::api::{Reply, Request, SnapshotRequest};
use tokio::task::spawn_blocking;

use crate::checkpoint::Plan;
use crate::container::{Container, Sleep};
use crate::error::{Error, Result};
use crate::ladder::{Ladder, Operation};
use crate::life::{Phase, Step};
use crate::network::Network;
use crate::process::Process;
use crate::sandbox::{KILLED, Sandbox};
use crate::vm::Vm;
use crate::vmm::Vmm;
use crate::wishes::PauseTo;
use crate::{oci, place};

/// What a VM that is asleep goes on from.
#[derive(Debug)]
pub struct Bed {
    /// Its state.
    pub snapshot: PathBuf,
    /// Whether that is part of a checkpoint, which is not ours to take away.
    pub kept: bool,
    /// The TAPs that wait for it.
    pub network: Arc<Network>,
}

impl Bed {
    /// Nobody goes on from it any more.
    async fn clear(&self) {
        if !self.kept {
            remove(&self.snapshot).await;
        }
    }
}

/// What a guest that is asleep still has and shall not have when it goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doomed {
    /// The container.
    pub container: String,
    /// One process that was added; empty for all of it.
    pub exec: String,
}

impl Sandbox {
    /// Stops a container where it is; to disk, all of the sandbox.
    pub async fn pause(self: &Arc<Self>, container: &Arc<Container>) -> Result<()> {
        let (sandbox, container) = (self.clone(), container.clone());
        let ladder = Ladder::begin(Operation::Pause);
        // Goes through to its end, whether or not the caller waits for it.
        to_its_end(async move {
            let paused = sandbox.do_pause(&container, None, &ladder).await;
            sandbox.tell_ladder(&container.id, &ladder, &paused);
            paused
        })
        .await
    }

    /// Brings all of the sandbox to the disk, as a checkpoint in `folder`, which stays there. It can be
    /// resumed, and others can go on from it.
    pub async fn pause_to_snapshot(
        self: &Arc<Self>,
        container: &Arc<Container>,
        folder: PathBuf,
    ) -> Result<()> {
        let (sandbox, container) = (self.clone(), container.clone());
        let ladder = Ladder::begin(Operation::PauseToDisk);
        to_its_end(async move {
            let paused = sandbox.do_pause(&container, Some(&folder), &ladder).await;
            sandbox.tell_ladder(&container.id, &ladder, &paused);
            paused
        })
        .await
    }

    async fn do_pause(
        &self,
        container: &Container,
        folder: Option<&Path>,
        ladder: &Ladder,
    ) -> Result<()> {
        let _changing = container.changing.lock().await;
        if container.status(&container.init) != Status::RUNNING {
            return Err(Error::State(format!(
                "task {} is not running, so it cannot be paused",
                container.id
            )));
        }
        if folder.is_some() || self.wishes().pause_to == PauseTo::Disk {
            return self.fall_asleep(folder, ladder).await;
        }
        let _quiet = self.quiet.read().await;
        ladder.reach("quiet");
        let vm = self.vm()?;
        if self.is_alone(container) {
            vm.vmm.ask(&Request::Pause {}).await?;
        } else {
            oci::pause(&vm.guest, &container.inside).await?;
        }
        ladder.reach("stopped");
        container.set_paused(true);
        self.tell_paused(container);
        Ok(())
    }

    /// Lets it go on. Done when the guest has answered.
    pub async fn resume(self: &Arc<Self>, container: &Arc<Container>) -> Result<()> {
        let (sandbox, container) = (self.clone(), container.clone());
        let ladder = Ladder::begin(Operation::Resume);
        to_its_end(async move {
            let resumed = sandbox.do_resume(&container, &ladder).await;
            sandbox.tell_ladder(&container.id, &ladder, &resumed);
            resumed
        })
        .await
    }

    async fn do_resume(&self, container: &Container, ladder: &Ladder) -> Result<()> {
        let _changing = container.changing.lock().await;
        if !container.is_paused() {
            return Err(Error::State(format!("task {} is not paused", container.id)));
        }
        if self.life.is_asleep() {
            return self.wake(ladder).await;
        }
        let _quiet = self.quiet.read().await;
        ladder.reach("quiet");
        let vm = self.vm()?;
        if self.is_alone(container) {
            vm.vmm.ask(&Request::Resume {}).await?;
            ladder.reach("running");
            vm.guest.call(&guest_protocol::Request::Ping).await?;
            ladder.reach("agent");
        } else {
            oci::resume(&vm.guest, &container.inside).await?;
            ladder.reach("running");
        }
        container.set_paused(false);
        self.tell_resumed(container);
        Ok(())
    }

    fn tell_paused(&self, container: &Container) {
        let container_id = container.id.clone();
        self.events.publish(&TaskPaused { container_id, ..Default::default() });
    }

    fn tell_resumed(&self, container: &Container) {
        let container_id = container.id.clone();
        self.events.publish(&TaskResumed { container_id, ..Default::default() });
    }

    /// Brings the VM to the disk: to a folder that is named, or one of its own.
    async fn fall_asleep(&self, folder: Option<&Path>, ladder: &Ladder) -> Result<()> {
        ladder.is(Operation::PauseToDisk);
        let _quiet = self.quiet.write().await;
        ladder.reach("quiet");
        let start = Instant::now();
        // Refused before anything is changed.
        let plan = folder.map(|folder| self.plan_checkpoint(folder)).transpose()?;
        let Phase::FallingAsleep(vm) = self.life.take(&Step::FallAsleep)? else {
            return Err(Error::State("the VM is gone".to_owned()));
        };
        self.set_sleep(Sleep::FallingAsleep);
        let saved = match &plan {
            Some(plan) => self.save_as_checkpoint(&vm, plan, ladder).await,
            None => self.save_in_bed(&vm, ladder).await,
        };
        let bed = match saved {
            Ok(bed) => bed,
            Err(error) => {
                self.stay_awake(&vm).await;
                return Err(error);
            }
        };
        self.life.take(&Step::Sleep(Arc::new(bed)))?;
        self.set_sleep(Sleep::Asleep);
        // The state is whole; what fails from here on takes nothing away.
        vm.vmm.kill().await;
        ladder.reach("gone");
        self.set_pids(std::process::id());
        if let Err(error) = self.write_down(None) {
            tracing::warn!(%error, "the end of the VM is not written down");
        }
        self.running().iter().for_each(|container| self.tell_paused(container));
        tracing::info!(ms = start.elapsed().as_millis(), "paused to disk: the VM is gone");
        Ok(())
    }

    async fn save_in_bed(&self, vm: &Vm, ladder: &Ladder) -> Result<Bed> {
        let saved = match self.next_snapshot() {
            Ok(snapshot) => self.save(vm, snapshot, ladder).await,
            Err(error) => Err(error),
        };
        if saved.is_err() {
            // A VMM that was killed leaves what it has begun; there is nothing else.
            if let Ok(bed) = self.place.bed(&self.config.pause_dir) {
                remove(&bed).await;
            }
        }
        saved
    }

    async fn save_as_checkpoint(&self, vm: &Vm, plan: &Plan, ladder: &Ladder) -> Result<Bed> {
        let saved = match self.save(vm, plan.snapshot(), ladder).await {
            // From here on the folder is a checkpoint.
            Ok(bed) => plan.finish().map(|()| Bed { kept: true, ..bed }),
            Err(error) => Err(error),
        };
        if saved.is_err() {
            remove(&plan.snapshot()).await;
            plan.give_up();
        }
        saved
    }

    /// Writes the state of the VM, which stands still afterwards.
    async fn save(&self, vm: &Vm, snapshot: PathBuf, ladder: &Ladder) -> Result<Bed> {
        self.let_go(vm).await?;
        ladder.reach("streams");
        let request = SnapshotRequest { keep_paused: true, ..SnapshotRequest::new(&snapshot) };
        let saved = match vm.vmm.ask_long(&Request::Snapshot(request)).await {
            Ok(Reply::Saved(report)) => report,
            Ok(other) => {
                return Err(Error::Unavailable(format!("the VMM answered {other:?}")));
            }
            Err(error) => return Err(error),
        };
        ladder.reach("saved");
        tracing::info!(
            us = saved.total_us,
            bytes = saved.memory_bytes,
            snapshot = %snapshot.display(),
            "the VM's state is on the disk"
        );
        Ok(Bed { snapshot, kept: false, network: vm.network() })
    }

    /// A folder for a snapshot, which does not exist.
    fn next_snapshot(&self) -> Result<PathBuf> {
        let bed = self.place.bed(&self.config.pause_dir)?;
        let number = self.snapshots.fetch_add(1, Ordering::Relaxed);
        let snapshot = bed.join(number.to_string());
        // A predecessor of the same name may have left some.
        place::remove(&snapshot)?;
        Ok(snapshot)
    }

    /// It could not be saved: it runs on as before, if it lives.
    async fn stay_awake(&self, vm: &Vm) {
        if vm.lives() {
            // It goes on by itself, unless the answer was lost.
            let _ = vm.vmm.ask(&Request::Resume {}).await;
            self.take_up(vm).await;
        }
        self.set_sleep(Sleep::Awake);
        if let Err(error) = self.life.take(&Step::StayAwake) {
            tracing::debug!(%error, "over meanwhile");
        }
    }

    /// Makes the guest let go of all streams, so that it can be saved.
    pub async fn let_go(&self, vm: &Vm) -> Result<()> {
        for process in self.processes() {
            process.let_go(&vm.guest).await?;
        }
        Ok(())
    }

    /// Connects them again, with the same guest.
    pub async fn take_up(&self, vm: &Vm) {
        for process in self.processes() {
            if let Err(error) = process.attach(&vm.guest, false).await {
                tracing::error!(%error, process = %process.name, "streams are lost");
            }
            process.settle();
        }
    }

    /// Makes a VM of the state on the disk.
    async fn wake(&self, ladder: &Ladder) -> Result<()> {
        ladder.is(Operation::ResumeFromDisk);
        let _quiet = self.quiet.write().await;
        ladder.reach("quiet");
        let start = Instant::now();
        let Phase::Waking(bed) = self.life.take(&Step::Wake)? else {
            return Err(Error::State("the VM's state is gone".to_owned()));
        };
        let vm = match self.go_on(&bed, ladder).await {
            Ok(vm) => Arc::new(vm),
            Err(error) => {
                self.life.take(&Step::SleepOn)?;
                if let Err(error) = self.write_down(None) {
                    tracing::warn!(%error, "the end of the VM is not written down");
                }
                tracing::error!(%error, "not resumed; the state on the disk is kept");
                return Err(error);
            }
        };
        self.life.take(&Step::Woken(vm.clone()))?;
        self.processes().iter().for_each(|process| process.settle());
        self.set_pids(vm.vmm.identity.pid);
        self.set_sleep(Sleep::Awake);
        self.bury(&vm).await;
        bed.clear().await;
        ladder.reach("cleared");
        let running = self.running();
        for container in running.iter().filter(|container| !container.is_frozen()) {
            self.tell_resumed(container);
        }
        tracing::info!(ms = start.elapsed().as_millis(), "resumed from disk");
        Ok(())
    }

    async fn go_on(&self, bed: &Bed, ladder: &Ladder) -> Result<Vm> {
        let vmm = Vmm::restore(&self.config, &self.place, &bed.snapshot, &bed.network)?;
        if let Err(error) = self.write_down(Some(vmm.identity)) {
            vmm.kill().await;
            return Err(error);
        }
        ladder.reach("vmm");
        let (network, wishes) = (bed.network.clone(), self.wishes());
        let vm = Vm::go_on(vmm, &self.config, &self.place, network, &wishes, ladder).await?;
        for process in self.processes() {
            if let Err(error) = process.attach(&vm.guest, true).await {
                vm.vmm.kill().await;
                return Err(error);
            }
        }
        ladder.reach("streams");
        Ok(vm)
    }

    /// Takes away from the guest what was killed and removed while it was asleep.
    async fn bury(&self, vm: &Vm) {
        for Doomed { container, exec } in self.take_doomed() {
            let done = if exec.is_empty() {
                oci::delete(&vm.guest, &container).await
            } else {
                let signal = libc::SIGKILL.unsigned_abs();
                oci::kill(&vm.guest, &container, &exec, signal, false).await
            };
            if let Err(error) = done {
                tracing::warn!(%error, container, exec, "what was killed is left in the guest");
            }
        }
    }

    /// Kills what is asleep: its end is told now, and comes true when the VM goes on. If nothing is
    /// left that could go on, the state on the disk goes.
    pub async fn kill_asleep(
        self: &Arc<Self>,
        container: &Arc<Container>,
        process: &Arc<Process>,
    ) -> Result<()> {
        let exec = process.name.exec.clone();
        self.doom(Doomed { container: container.inside.clone(), exec: exec.clone() });
        if exec.is_empty() {
            for added in container.execs().iter().filter(|added| added.has_started()) {
                self.ended(container, added, KILLED).await;
            }
        }
        self.ended(container, process, KILLED).await;
        if self.all().iter().any(|each| each.init.end().is_none()) {
            return Ok(());
        }
        if let Phase::Asleep(bed) = self.life.now() {
            self.life.take(&Step::End)?;
            bed.clear().await;
        }
        Ok(())
    }

    fn set_sleep(&self, sleep: Sleep) {
        self.all().iter().for_each(|container| container.set_sleep(sleep));
    }

    fn set_pids(&self, pid: u32) {
        self.processes().iter().filter(|each| each.end().is_none()).for_each(|each| {
            each.set_pid(pid);
        });
    }

    fn running(&self) -> Vec<Arc<Container>> {
        let all = self.all().into_iter();
        all.filter(|each| each.init.has_started() && each.init.end().is_none()).collect()
    }

    fn processes(&self) -> Vec<Arc<Process>> {
        self.all().iter().flat_map(|container| container.processes()).collect()
    }
}

/// Runs a piece of work that must not be given up in its midst, as a call is whose client is gone.
pub async fn to_its_end(work: impl Future<Output = Result<()>> + Send + 'static) -> Result<()> {
    tokio::spawn(work).await.map_err(|error| Error::Unavailable(error.to_string()))?
}

/// The memory of a VM that runs is a mapping of a file in it, which does not need a name.
async fn remove(snapshot: &Path) {
    let path = snapshot.to_owned();
    if let Ok(Err(error)) = spawn_blocking(move || place::remove(&path)).await {
        tracing::warn!(%error, "a snapshot is left on the disk");
    }
}
