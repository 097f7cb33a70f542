//! A backend as a device uses it: who is connected, what was agreed on, and what is live.
//!
//! A [`Backend`] is connected when it is made, so that one that is not there is a mistake that is told
//! at once, and the device can offer what the backend can. It connects again when the driver starts
//! the device after the backend had gone.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::connection::{Connection, Needs, Wires};
use super::{VhostUserConfig, VhostUserCounts, VhostUserError};
use crate::event::Event;
use crate::executor::{ExecutorHandle, Running};
use crate::virtio::queue::ActiveQueue;
use crate::virtio::vhost::pump::{Call, OnLoss, Pump};
use crate::virtio::{Activation, StartError};

/// A connection, and what its backend works on.
#[derive(Default)]
struct Session {
    /// `None` after a failure, until the driver tries again.
    connection: Option<Connection>,
    /// The rings that it has, of which it works on those that are enabled.
    rings: Vec<u16>,
}

/// Says which rings a backend works on. Clones are of the same one.
#[derive(Clone, Default)]
pub(in crate::virtio) struct Switch(Arc<Mutex<Session>>);

impl Switch {
    fn session(&self) -> MutexGuard<'_, Session> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rings below `count` are worked on, the others are not. Does nothing without a connection:
    /// the next start says it anew.
    pub fn enable_below(&self, count: u16) -> Result<(), VhostUserError> {
        let mut session = self.session();
        let Session { connection, rings } = &mut *session;
        match connection {
            Some(connection) => connection.enable_below(rings, count),
            None => Ok(()),
        }
    }
}

/// A backend, and the rings that are in its hands.
pub(in crate::virtio) struct Backend {
    /// For the log.
    name: &'static str,
    options: VhostUserConfig,
    needs: Needs,
    /// What the first backend offered; another one must have the same.
    offered: u64,
    config: Vec<u8>,
    counts: Arc<VhostUserCounts>,
    /// Per queue, signalled by the backend.
    calls: Vec<Event>,
    fault: Event,
    session: Switch,
    live: Option<Live>,
    on_loss: Option<OnLoss>,
}

/// What there is while it is live.
struct Live {
    queues: Vec<ActiveQueue>,
    pump: Running<Pump>,
    broken: Arc<AtomicBool>,
}

impl Backend {
    /// Connects to the backend of a device with `queues` queues. Waits for its answers.
    pub fn connect(
        name: &'static str,
        options: VhostUserConfig,
        needs: Needs,
        queues: u16,
    ) -> Result<Self, VhostUserError> {
        let host = |source| VhostUserError::Host { what: "eventfd", source };
        let calls: io::Result<_> = (0..queues).map(|_| Event::new()).collect();
        let (calls, fault) = (calls.map_err(host)?, Event::new().map_err(host)?);
        let mut this = Self {
            name,
            options,
            needs,
            offered: 0,
            config: Vec::new(),
            counts: Arc::default(),
            calls,
            fault,
            session: Switch::default(),
            live: None,
            on_loss: None,
        };
        let connection = this.open()?;
        this.offered = connection.features();
        this.config = connection.config().to_vec();
        this.session.session().connection = Some(connection);
        Ok(this)
    }

    /// Calls `tell` when the backend goes.
    pub fn on_loss(&mut self, tell: OnLoss) {
        self.on_loss = Some(tell);
    }

    /// What the backend offers, its protocol's bit not among it.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Its configuration space, with the number of queues that we have.
    pub fn config(&self) -> &[u8] {
        &self.config
    }

    /// What is counted.
    pub fn counts(&self) -> &Arc<VhostUserCounts> {
        &self.counts
    }

    /// True while it has queues.
    pub fn is_live(&self) -> bool {
        self.live.is_some()
    }

    /// The way to switch its rings on and off.
    pub fn switch(&self) -> Switch {
        self.session.clone()
    }

    fn open(&self) -> Result<Connection, VhostUserError> {
        let VhostUserConfig { socket, patience, .. } = &self.options;
        let connection = Connection::open(socket, self.needs, *patience)?;
        self.counts.connections.one();
        Ok(connection)
    }

    /// The connection that there is, or a new one to a backend that is as the guest knows it.
    fn connected(&self, session: &mut Session) -> Result<Connection, VhostUserError> {
        if let Some(connection) = session.connection.take().filter(Connection::is_alive) {
            return Ok(connection);
        }
        let connection = self.open()?;
        match connection.config() == self.config {
            true => Ok(connection),
            false => Err(VhostUserError::Changed),
        }
    }

    /// Hands the queues of `activation` over, those below `enabled` to be worked on at once. The
    /// backend's signals are passed on by `executor`.
    pub fn start(
        &mut self,
        executor: &ExecutorHandle,
        activation: Activation,
        enabled: u16,
    ) -> Result<(), StartError> {
        let switch = self.session.clone();
        let mut session = switch.session();
        let connection = self.connected(&mut session).map_err(|error| {
            self.counts.failures.one();
            StartError::Host {
                what: "connecting to the vhost-user backend",
                source: io::Error::other(error),
            }
        })?;
        // Put back only if it starts: the backend may have part of the queues otherwise, and only
        // its end takes them back.
        let (connection, live) =
            self.begin(executor, connection, activation, enabled).inspect_err(|_| {
                self.counts.failures.one();
            })?;
        session.rings = live.queues.iter().map(|queue| queue.index().0).collect();
        session.connection = Some(connection);
        self.live = Some(live);
        Ok(())
    }

    fn begin(
        &self,
        executor: &ExecutorHandle,
        mut connection: Connection,
        activation: Activation,
        enabled: u16,
    ) -> Result<(Connection, Live), StartError> {
        let Activation { memory, mut queues, features, notifier } = activation;
        queues.sort_by_key(ActiveQueue::index);
        self.fault.clear();
        let mut calls = Vec::with_capacity(queues.len());
        let mut wired = Vec::with_capacity(queues.len());
        for queue in &queues {
            let index = queue.index().0;
            let call = self.calls.get(usize::from(index)).ok_or(StartError::MissingQueue(index))?;
            call.clear();
            calls.push(Call { event: call.clone(), interrupt: queue.interrupt().clone() });
            wired.push((queue, Wires { call, fault: &self.fault }));
        }
        let failed = |error| StartError::Host {
            what: "starting the vhost-user backend",
            source: io::Error::other(error),
        };
        connection.start(&memory, features, &wired, enabled).map_err(failed)?;
        let peer = connection
            .peer()
            .map_err(|source| StartError::Host { what: "watching the backend", source })?;
        let broken = Arc::<AtomicBool>::default();
        let pump = Pump {
            device: self.name,
            calls,
            fault: self.fault.clone(),
            peer: Some(peer),
            notifier,
            signals: self.counts.signals.clone(),
            broken: broken.clone(),
            on_loss: self.on_loss.clone(),
        };
        let pump = executor.run(pump).map_err(|no| StartError::Executor(no.error))?;
        Ok((connection, Live { queues, pump, broken }))
    }

    /// Takes the queues back. Waits for what is in flight, as long as [`VhostUserConfig::patience`]
    /// says. A backend that cannot finish is let go, and the driver is asked for a reset.
    pub fn stop(&mut self) -> Vec<ActiveQueue> {
        let Some(live) = self.live.take() else {
            return Vec::new();
        };
        let Live { mut queues, pump, broken } = live;
        let mut session = self.session.session();
        session.rings.clear();
        // Signals are left to the pump until the queues are back: an interrupt may end a wait.
        let stopped = match session.connection.as_mut().filter(|one| one.is_alive()) {
            Some(connection) => {
                let broken = || broken.load(Ordering::Acquire);
                connection.stop(&mut queues, self.needs.drains, broken)
            }
            None => Err(VhostUserError::Answer {
                what: "GET_VRING_BASE",
                source: vhost::Error::VhostUserProtocol(vhost::vhost_user::Error::Disconnected),
            }),
        };
        let notifier = pump.stop().map(|pump| pump.notifier);
        self.fault.clear();
        if let Err(error) = stopped {
            session.connection = None;
            for queue in &mut queues {
                // Fails only for rings outside of guest RAM, and the driver is told that its
                // requests may be lost.
                let _ = queue.take_over(None);
            }
            if !broken.load(Ordering::Acquire) {
                self.counts.signals.losses.one();
                if let Some(notifier) = notifier {
                    notifier.gives_up(self.name, error);
                }
            }
        }
        queues
    }
}
