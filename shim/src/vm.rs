//! The VM of a sandbox: booted once, and the guest in it made ready for containers.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::ladder::Ladder;
use crate::network::Network;
use crate::oci;
use crate::place::{GUEST_SHARE, Place};
use crate::vmm::Vmm;
use crate::wishes::Wishes;

/// Between two tries to reach a port.
const AGAIN: Duration = Duration::from_millis(20);
/// How long the guest may take for each step of it.
const SET_UP: Duration = Duration::from_secs(20);

/// What a copy of a VM becomes.
#[derive(Clone, Debug)]
pub struct Copy {
    /// Its host name, and its container's.
    pub hostname: String,
    /// Its container, by its name in the guest.
    pub container: String,
    /// What must answer before it is ready.
    pub wishes: Wishes,
}

/// A VM whose guest is ready.
#[derive(Debug)]
pub struct Vm {
    /// The process around it.
    pub vmm: Vmm,
    /// The way in.
    pub guest: Guest,
    /// Its network. The TAPs are kept here, so that they outlast the VMM.
    network: RwLock<Arc<Network>>,
}

impl Vm {
    fn new(vmm: Vmm, place: &Place, network: Arc<Network>) -> Self {
        let guest = Guest::new(place.file("vsock.sock"));
        Self { vmm, guest, network: RwLock::new(network) }
    }

    /// Its network.
    pub fn network(&self) -> Arc<Network> {
        self.network.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives the guest the network that was made after it, if one was.
    pub async fn take_network(&self) -> Result<()> {
        let network = self.network();
        if !network.waits() {
            return Ok(());
        }
        let Some(found) = network.look().await? else { return Ok(()) };
        self.set_up("set up its network", &found.renewal()).await?;
        *self.network.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(found);
        Ok(())
    }

    /// Takes over a VMM that has just been started, and waits until containers can be made in it.
    /// Ends it if that fails.
    pub async fn boot(
        vmm: Vmm,
        config: &Config,
        place: &Place,
        network: Arc<Network>,
        ladder: &Ladder,
    ) -> Result<Self> {
        let vm = Self::new(vmm, place, network);
        let done = vm.prepare(config, &vm.network().script(), ladder).await;
        vm.or_ended(done).await
    }

    /// The VM, or the reason why it cannot be used; then its VMM is ended.
    async fn or_ended(self, done: Result<()>) -> Result<Self> {
        if let Err(error) = done {
            self.vmm.kill().await;
            return Err(error);
        }
        Ok(self)
    }

    /// Takes over a VMM that goes on with a snapshot, and waits until its agent has answered, and
    /// the ports that its pod wants to be reached at. Ends it if that fails.
    pub async fn go_on(
        vmm: Vmm,
        config: &Config,
        place: &Place,
        network: Arc<Network>,
        wishes: &Wishes,
        ladder: &Ladder,
    ) -> Result<Self> {
        let vm = Self::new(vmm, place, network);
        let answers = async {
            vm.vmm.ready(Duration::from_secs(config.boot_timeout_s)).await?;
            vm.guest.call(&guest_protocol::Request::Ping).await?;
            ladder.reach("agent");
            vm.answers(wishes).await?;
            ladder.reach("ready");
            Ok(())
        };
        let done = answers.await;
        vm.or_ended(done).await
    }

    /// Takes over a VMM that goes on with a checkpoint, and makes its guest another machine. Ends it
    /// if that fails.
    pub async fn copied(
        vmm: Vmm,
        config: &Config,
        place: &Place,
        network: Arc<Network>,
        copy: &Copy,
        ladder: &Ladder,
    ) -> Result<Self> {
        let vm = Self::new(vmm, place, network);
        let becomes = async {
            vm.vmm.ready(Duration::from_secs(config.boot_timeout_s)).await?;
            ladder.reach("agent");
            vm.set_up("take its network", &vm.network().renewal()).await?;
            vm.rename(copy).await?;
            ladder.reach("identity");
            vm.answers(&copy.wishes).await?;
            ladder.reach("ready");
            Ok(())
        };
        let done = becomes.await;
        vm.or_ended(done).await
    }

    /// Gives the container its host name, which it may have apart from the guest's.
    async fn rename(&self, copy: &Copy) -> Result<()> {
        let state = oci::state(&self.guest, &copy.container).await?;
        if state.pid == 0 {
            return Ok(());
        }
        let (pid, name) = (state.pid, &copy.hostname);
        self.set_up("take its host name", &format!("nsenter -t {pid} -u hostname {name}")).await
    }

    /// Waits until all that is wished for answers.
    pub async fn answers(&self, wishes: &Wishes) -> Result<()> {
        let deadline = tokio::time::Instant::now() + wishes.patience;
        let network = self.network();
        let of_cards = network
            .cards
            .iter()
            .flat_map(|card| card.addresses.iter().map(|(address, _)| *address));
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let addresses: Vec<IpAddr> = std::iter::once(local).chain(of_cards).collect();
        for probe in &wishes.probes {
            let script = probe.script(&addresses);
            while !self.guest.run(["/bin/sh", "-c", &script], SET_UP).await?.status.success() {
                if tokio::time::Instant::now() > deadline {
                    let seconds = wishes.patience.as_secs();
                    return Err(Error::Unavailable(format!("{probe} within {seconds} s")));
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
        Ok(())
    }

    async fn prepare(&self, config: &Config, network: &str, ladder: &Ladder) -> Result<()> {
        self.vmm.ready(Duration::from_secs(config.boot_timeout_s)).await?;
        ladder.reach("agent");
        let files = format!("mkdir -p {GUEST_SHARE} && mount -t virtiofs cube {GUEST_SHARE}");
        tokio::try_join!(
            self.set_up("mount its files", &files),
            self.set_up("set up its network", network),
        )?;
        ladder.reach("set_up");
        Ok(())
    }

    async fn set_up(&self, what: &str, script: &str) -> Result<()> {
        let output = self.guest.run(["/bin/sh", "-c", script], SET_UP).await?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(Error::Unavailable(format!("the guest cannot {what}: {}", said.trim())))
    }

    /// Whether it is still there.
    pub fn lives(&self) -> bool {
        self.vmm.ended().borrow().is_none()
    }
}
