//! The control thread: the one that changes a VM's state.
//!
//! Every command that holds a VM waits in [`Control::next`], which carries out the api requests
//! and tells what else has happened.

use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use guest_protocol::{Client, Hello, PowerOff};

use crate::agent::{self, Guest};
use crate::api::{
    BalloonInfo, ErrorKind, Info, MemoryMethod, MetricsFormat, Reply, Request, SnapshotReport,
    SnapshotRequest, StopHow,
};
use crate::cold_code;
use crate::command::guest_command::with_causes;
use crate::event::{Call, Event, Events};
use crate::identity::Identity;
use crate::metrics;
use crate::outcome::Outcome;
use crate::snapshot::record;
use crate::snapshot::save::{Job, SnapshotError};
use crate::state;
use crate::vcpu::VcpuError;
use crate::vm::Vm;

/// What a command that holds a VM reacts to.
#[derive(Debug)]
pub enum Happening {
    /// The guest has ended so. The VM stands still.
    Ended(Outcome),
    /// The agent says hello for the first time.
    Ready,
    /// A restored guest does not get ready, for this reason.
    NotReady(String),
    /// What was waited for outside the VM is over.
    Finished,
    /// This process got a signal.
    Signal(i32),
    /// The time given is over.
    TimedOut,
}

/// A VM with the events that concern it.
pub struct Control {
    vm: Vm,
    events: Events,
    receiver: Receiver<Event>,
    /// What the agent of a guest that is ready has said.
    hello: Option<Hello>,
    /// What the agent of a restored guest had said, if it had, before it was saved.
    said: Option<Hello>,
    /// Who a restored guest shall be, until it has been told.
    identity: Option<Identity>,
    /// When a guest that was asked to end is ended by force.
    force_at: Option<Instant>,
}

impl Control {
    /// Takes over a VM.
    pub fn new(vm: Vm, events: Events, receiver: Receiver<Event>) -> Self {
        Self { vm, events, receiver, hello: None, said: None, identity: None, force_at: None }
    }

    /// The VM.
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Lets the guest run for the first time.
    pub fn start(&mut self) -> Result<(), VcpuError> {
        self.vm.start()
    }

    /// Takes over a VM that was restored, whose agent had said `hello`, and who it shall be.
    #[must_use]
    pub fn restored(mut self, hello: Option<Hello>, identity: Identity) -> Self {
        self.said = hello;
        self.identity = Some(identity);
        self
    }

    /// Lets the guest go on.
    pub fn resume(&mut self) -> Result<(), VcpuError> {
        self.vm.resume()?;
        if let Some(hello) = self.said.clone() {
            self.identify(hello);
        }
        Ok(())
    }

    /// Tells a restored guest who it is, if it has not been told; false if it has, or is no such.
    fn identify(&mut self, hello: Hello) -> bool {
        let Some(identity) = self.identity.take() else { return false };
        agent::renew(self.vm.vsock(), hello, identity, self.events.clone());
        true
    }

    fn snapshot(&mut self, request: &SnapshotRequest) -> Result<SnapshotReport, SnapshotError> {
        self.vm.collect_ejected();
        let mut job = Job::prepare(&self.vm, request)?;
        // Memory is read from here on, which the guest shall not stand still for longer than it must.
        self.vm.cancel_prefetch();
        let origin = self.vm.origin.clone();
        if let Some(origin) = &mut self.vm.origin {
            origin.read_for_a_snapshot();
        }
        let runs = self.vm.state() == state::VmState::Running;
        if runs {
            job.copy_ahead(&mut self.vm, request)?;
        }
        let hello = self.hello.as_ref().or(self.said.as_ref());
        // A guest that has ended has its last access not behind it, and its end is on its way to us.
        let ended = || self.events.outcome().is_some();
        let stopped = Instant::now();
        let frozen = if runs {
            let mut paused = self.vm.pause()?;
            if ended() {
                return Err(SnapshotError::Ended);
            }
            let frozen = paused.freeze(job, hello)?;
            if request.keep_paused {
                paused.keep();
            }
            frozen
        } else if ended() {
            return Err(SnapshotError::Ended);
        } else {
            job.freeze(&mut self.vm, hello)?
        };
        let goes_on = runs && !request.keep_paused;
        let finished = frozen.finish(goes_on.then(|| stopped.elapsed()));
        match &finished {
            Ok(report) => {
                self.vm.saved(&report.id);
                if matches!(report.memory, MemoryMethod::Log | MemoryMethod::Mapping) {
                    // Only pages that were there.
                    self.vm.origin = origin;
                }
            }
            // It ran, and a snapshot that failed changes nothing.
            Err(_) if runs && !goes_on => self.vm.resume()?,
            Err(_) => {}
        }
        finished
    }

    /// Waits for the next thing that happens, until `deadline`.
    pub fn next(&mut self, deadline: Option<Instant>) -> Happening {
        loop {
            let until = [deadline, self.force_at].into_iter().flatten().min();
            match self.receive(until) {
                Some(Event::Ended) => return self.ended(),
                Some(Event::Signal(signal)) => return Happening::Signal(signal),
                Some(Event::Finished) => return Happening::Finished,
                Some(Event::Call(call)) => {
                    if let Some(happening) = self.serve(call) {
                        return happening;
                    }
                }
                Some(Event::Ejected) => self.vm.collect_ejected(),
                // Of a guest that was saved before its agent could say anything.
                Some(Event::Ready(hello)) if self.identify(hello.clone()) => {
                    self.said = Some(hello);
                }
                Some(Event::NotReady(reason)) => return Happening::NotReady(reason),
                Some(Event::Ready(hello)) => {
                    if self.hello.replace(hello).is_none() {
                        cold_code::let_go();
                        return Happening::Ready;
                    }
                }
                None if self.force_at.is_some_and(|at| at <= Instant::now()) => {
                    tracing::warn!("the guest did not end in time and is ended by force");
                    return self.kill();
                }
                None => return Happening::TimedOut,
            }
        }
    }

    fn receive(&self, until: Option<Instant>) -> Option<Event> {
        match until {
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                self.receiver.recv_timeout(left).ok()
            }
            None => self.receiver.recv().ok(),
        }
    }

    fn ended(&mut self) -> Happening {
        self.vm.end();
        Happening::Ended(self.events.outcome().cloned().unwrap_or(Outcome::Stopped))
    }

    /// Ends the guest at once.
    pub fn kill(&mut self) -> Happening {
        self.events.end(Outcome::Stopped);
        self.ended()
    }

    /// Asks the guest to sync its file systems and power off; by force after `grace`.
    pub fn power_off(&mut self, grace: Duration) {
        self.force_at = Some(Instant::now() + grace);
        let guest = Guest(self.vm.vsock().clone());
        let ask = move || {
            let asked =
                Client::connect(guest).and_then(|mut client| client.power_off(PowerOff::Poweroff));
            if let Err(error) = asked {
                tracing::warn!(%error, "the agent could not be asked to power off");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("power-off".to_owned()).spawn(ask) {
            tracing::warn!(%error, "the agent could not be asked to power off");
        }
    }

    /// Carries out an api call; something for the command if the call ended the VM.
    fn serve(&mut self, call: Call) -> Option<Happening> {
        let Call { request, reply } = call;
        if let Err(illegal) = state::check(self.vm.state(), &request) {
            answer(&reply, error(ErrorKind::Illegal, &illegal));
            return None;
        }
        match request {
            Request::Info {} => answer(&reply, Reply::Info(Box::new(self.info()))),
            Request::Metrics { format } => answer(&reply, self.metrics(format)),
            Request::Shares {} => answer(&reply, Reply::Shares { shares: self.vm.shares() }),
            Request::AllowShares { directories } => {
                let told = self.vm.allow_shares(directories.as_deref());
                let told = told.map(|()| Reply::Shares { shares: self.vm.shares() });
                answer(&reply, told.unwrap_or_else(|refused| failure(&refused)));
            }
            Request::Pause {} => {
                answer(&reply, done(self.vm.pause().map(crate::vm::Paused::keep)));
            }
            Request::Resume {} => answer(&reply, done(self.resume())),
            Request::Snapshot(request) => {
                let told = self.snapshot(&request).map(|report| Reply::Saved(Box::new(report)));
                answer(&reply, told.unwrap_or_else(|failed| failure(&failed)));
            }
            Request::RecordHotPages { file } => {
                let told = record::record(&self.vm, file.as_deref()).map(Reply::HotPages);
                answer(&reply, told.unwrap_or_else(|failed| failure(&failed)));
            }
            Request::SetBalloon { bytes } => answer(&reply, self.set_balloon(bytes)),
            Request::NewGeneration {} => answer(&reply, done(self.vm.renew_generation())),
            Request::AddDisk { disk } => answer(&reply, done(self.vm.add_disk(&disk))),
            Request::AddNet { net } => answer(&reply, done(self.vm.add_net(&net))),
            Request::RemoveDevice { id } => answer(&reply, done(self.vm.remove_device(&id))),
            Request::Stop { how, timeout_ms } => {
                let happening = self.stop(how, Duration::from_millis(timeout_ms));
                answer(&reply, Reply::Done);
                return happening;
            }
        }
        None
    }

    fn stop(&mut self, how: StopHow, timeout: Duration) -> Option<Happening> {
        // A guest that stands still, or has no agent, cannot be asked.
        let moves = self.vm.state() == state::VmState::Running;
        match how {
            StopHow::PowerOff if moves && self.hello.is_some() => self.power_off(timeout),
            StopHow::PowerButton if moves => {
                self.force_at = Some(Instant::now() + timeout);
                self.vm.press_power_button();
            }
            _ => return Some(self.kill()),
        }
        None
    }

    fn set_balloon(&self, bytes: u64) -> Reply {
        let ram = self.vm.config().memory.bytes();
        match self.vm.balloon() {
            None => {
                error(ErrorKind::Failed, &"this VM has no balloon; start it without --no-balloon")
            }
            Some(_) if bytes > ram => {
                let message =
                    format!("a balloon of {bytes} bytes is larger than the guest's {ram}");
                error(ErrorKind::Invalid, &message)
            }
            Some(balloon) => {
                // The host wants memory, and gets it sooner if nobody takes more.
                if bytes > 0 {
                    self.vm.cancel_prefetch();
                }
                balloon.set_target(bytes);
                Reply::Done
            }
        }
    }

    fn metrics(&self, format: MetricsFormat) -> Reply {
        let families = self.vm.metrics();
        match format {
            MetricsFormat::Json => Reply::Metrics { families },
            MetricsFormat::Prometheus => {
                Reply::MetricsText { text: metrics::prometheus(&families) }
            }
        }
    }

    fn info(&self) -> Info {
        let config = self.vm.config().clone();
        Info {
            state: self.vm.state(),
            ready: self.hello.is_some(),
            hello: self.hello.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            vsock: config.vsock.clone(),
            balloon: self.vm.balloon().map(|balloon| BalloonInfo {
                target_bytes: balloon.target_bytes(),
                actual_bytes: balloon.actual_bytes(),
            }),
            devices: self.vm.devices(),
            disks: self.vm.disks(),
            net: self.vm.cards(),
            prefetch: self.vm.prefetch(),
            config,
        }
    }
}

fn error(kind: ErrorKind, error: &impl std::fmt::Display) -> Reply {
    Reply::Error { kind, message: error.to_string() }
}

fn done<E: std::error::Error>(result: Result<(), E>) -> Reply {
    result.map_or_else(|failed| failure(&failed), |()| Reply::Done)
}

fn failure(failed: &impl std::error::Error) -> Reply {
    error(ErrorKind::Failed, &with_causes(failed))
}

fn answer(reply: &SyncSender<Reply>, with: Reply) {
    // A caller that has gone does not want to know.
    let _ = reply.try_send(with);
}
