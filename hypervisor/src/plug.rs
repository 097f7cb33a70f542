//! Network cards that come while the guest runs, and what may be plugged at all. Disks are plugged by
//! [`Vm::add_disk`].

use devices::ids::DeviceId;
use devices::virtio::net::{Net, NetOption, TapSource};

use crate::builder::BuildError;
use crate::config::VmConfig;
use crate::vm::{PlugError, Vm};

impl Vm {
    /// Plugs a network card while the guest runs. Legal while running, with PCI.
    ///
    /// It is on a TAP by name: a descriptor that is called by its number is one of this process,
    /// of which whoever asks knows nothing.
    pub fn add_net(&mut self, card: &NetOption) -> Result<(), PlugError> {
        let slots = self.slots()?;
        if let TapSource::Fd(fds) = &card.source {
            return Err(PlugError::Descriptors(fds.clone()));
        }
        let config = with_net(self.config(), card);
        config.validate().map_err(PlugError::Config)?;
        let id = DeviceId::new(card.id.clone());
        let taps = card.open().map_err(BuildError::from)?;
        let device = Net::new(self.executor.handle(), taps, card.config(id.clone()))
            .map_err(BuildError::from)?;
        let (slot, transport) = slots.attach(&id, Box::new(device))?;
        self.transports.push((id, transport));
        self.config = config;
        slots.announce(slot);
        Ok(())
    }

    /// Disks and network cards can be unplugged. A guest without its other devices would be out of
    /// reach, or out of memory.
    pub(crate) fn can_be_unplugged(&self, id: &str) -> bool {
        let disks = self.config().all_disks().into_iter().map(|disk| disk.id);
        let cards = self.config().all_net().into_iter().map(|card| card.id);
        let shares = self.config().all_fs().into_iter().map(|share| share.id);
        disks.chain(cards).chain(shares).any(|other| other == id)
    }
}

/// What the VM would be with one more card.
fn with_net(config: &VmConfig, card: &NetOption) -> VmConfig {
    let mut config = config.clone();
    config.net.push(card.clone());
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigError, DiskConfig};

    fn config() -> VmConfig {
        let config = r#"{"cpus": 1, "memory": "64M", "kernel": "/kernel"}"#;
        VmConfig {
            rootfs: Some("/root.img".into()),
            disks: vec![DiskConfig::new("/a")],
            net: vec![NetOption::tap("tap0")],
            ..serde_json::from_str(config).unwrap()
        }
    }

    #[test]
    fn a_name_that_is_taken_by_any_device_is_refused() {
        for taken in ["net0", "disk1", "rootfs", "vsock", "rng"] {
            let card = NetOption { id: taken.to_owned(), ..NetOption::tap("tap1") };
            let error = with_net(&config().named(), &card).validate().unwrap_err();
            assert_eq!(error, ConfigError::DuplicateId(taken.to_owned()));
        }
        let card = NetOption { id: "lan".to_owned(), ..NetOption::tap("tap1") };
        assert_eq!(with_net(&config().named(), &card).validate(), Ok(()));
    }
}
