//! The VM of a sandbox: booted once, and the guest in it made ready for containers.

use std::time::Duration;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::place::{GUEST_SHARE, Place};
use crate::vmm::Vmm;

/// How long the guest may take for each step of it.
const SET_UP: Duration = Duration::from_secs(20);

/// A VM whose guest is ready.
#[derive(Debug)]
pub struct Vm {
    /// The process around it.
    pub vmm: Vmm,
    /// The way in.
    pub guest: Guest,
}

impl Vm {
    /// Takes over a VMM that has just been started, and waits until containers can be made in it.
    /// Ends it if that fails.
    /// `network` is what a shell in the guest has to do for its network.
    pub async fn boot(vmm: Vmm, config: &Config, place: &Place, network: &str) -> Result<Self> {
        let vm = Self { vmm, guest: Guest::new(place.file("vsock.sock")) };
        match vm.prepare(config, network).await {
            Ok(()) => Ok(vm),
            Err(error) => {
                vm.vmm.kill().await;
                Err(error)
            }
        }
    }

    async fn prepare(&self, config: &Config, network: &str) -> Result<()> {
        self.vmm.ready(Duration::from_secs(config.boot_timeout_s)).await?;
        let files = format!("mkdir -p {GUEST_SHARE} && mount -t virtiofs cube {GUEST_SHARE}");
        tokio::try_join!(
            self.set_up("mount its files", &files),
            self.set_up("set up its network", network),
        )?;
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
