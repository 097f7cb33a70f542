//! A device that does nothing but hold its queues, for the tests of what surrounds devices.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};
use crate::virtio::{
    Activation, ActiveQueue, DeviceType, Identity, Notifier, StartError, VirtioDevice,
};

/// The sizes of a stub's queues.
pub const STUB_QUEUES: &[u16] = &[64, 16];
/// The feature bits that a stub offers.
pub const STUB_FEATURES: u64 = 0b101;
/// Bytes of a stub's configuration space, all writable.
pub const STUB_CONFIG_LEN: usize = 12;

/// What was asked of a stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Start, with that many queues.
    Start(usize),
    /// Stop of a started device.
    Stop,
    /// Reset.
    Reset,
}

#[derive(Default)]
struct Shared {
    calls: Vec<Call>,
    queues: Option<Vec<ActiveQueue>>,
    notifier: Option<Notifier>,
    broken: bool,
}

/// The stub; what it got is at its [`StubDesk`].
pub struct Stub {
    shared: Arc<Mutex<Shared>>,
    config: [u8; STUB_CONFIG_LEN],
}

/// The test's side of a [`Stub`].
#[derive(Clone, Default)]
pub struct StubDesk(Arc<Mutex<Shared>>);

impl StubDesk {
    /// A desk without a device.
    pub fn new() -> Self {
        Self::default()
    }

    /// A stub that leaves its queues at this desk.
    pub fn device(&self) -> Box<Stub> {
        Box::new(Stub { shared: self.0.clone(), config: *b"config space" })
    }

    /// From now on stubs cannot be started.
    pub fn break_down(&self) {
        lock(&self.0).broken = true;
    }

    /// What was asked since the last call.
    pub fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut lock(&self.0).calls)
    }

    /// Does something with queue `index` of the live device.
    pub fn with_queue<R>(&self, index: usize, act: impl FnOnce(&mut ActiveQueue) -> R) -> R {
        act(&mut lock(&self.0).queues.as_mut().expect("not started")[index])
    }

    /// The live device's notifier.
    pub fn notifier(&self) -> Notifier {
        lock(&self.0).notifier.clone().expect("never started")
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VirtioDevice for Stub {
    fn identity(&self) -> Identity {
        Identity {
            device_type: DeviceType::Console,
            features: STUB_FEATURES,
            queue_sizes: STUB_QUEUES,
            config_len: STUB_CONFIG_LEN as u64,
        }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let offset = offset as usize;
        data.copy_from_slice(&self.config[offset..offset + data.len()]);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let offset = offset as usize;
        self.config[offset..offset + data.len()].copy_from_slice(data);
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        let mut shared = lock(&self.shared);
        shared.calls.push(Call::Start(activation.queues.len()));
        if shared.broken {
            return Err(StartError::Host { what: "the stub", source: io::ErrorKind::Other.into() });
        }
        shared.queues = Some(activation.queues);
        shared.notifier = Some(activation.notifier);
        Ok(())
    }

    fn stop(&mut self) -> Vec<ActiveQueue> {
        let mut shared = lock(&self.shared);
        match shared.queues.take() {
            Some(queues) => {
                shared.calls.push(Call::Stop);
                queues
            }
            None => Vec::new(),
        }
    }

    fn reset(&mut self) {
        lock(&self.shared).calls.push(Call::Reset);
    }
}

/// A stub's saved form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StubState {
    config: Vec<u8>,
}

impl Schema for StubState {
    const KIND: &'static str = "stub";
    const VERSION: u32 = 1;
}

impl Snapshot for Stub {
    type State = StubState;

    fn save(&self) -> Result<StubState, SaveError> {
        match lock(&self.shared).queues {
            Some(_) => Err(SaveError::Running("stub")),
            None => Ok(StubState { config: self.config.to_vec() }),
        }
    }

    fn restore(&mut self, state: StubState) -> Result<(), RestoreError> {
        self.config = state.config.as_slice().try_into().map_err(|_| RestoreError::Invalid {
            kind: StubState::KIND,
            field: "config",
            value: format!("{} bytes", state.config.len()),
        })?;
        Ok(())
    }
}
