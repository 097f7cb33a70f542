//! Network cards that come while the guest runs, and what may be plugged at all. Disks are plugged by
//! [`Vm::add_disk`].

use devices::ids::DeviceId;
use devices::memory::is_shared;
use devices::virtio::net::{NetOption, NetSource};

use crate::cards::OpenedCard;
use crate::config::VmConfig;
use crate::vm::{PlugError, Vm};

impl Vm {
    /// Plugs a network card while the guest runs. Legal while running, with PCI.
    ///
    /// It is on a TAP by name: a descriptor that is called by its number is one of this process,
    /// of which whoever asks knows nothing.
    pub fn add_net(&mut self, card: &NetOption) -> Result<(), PlugError> {
        let slots = self.slots()?;
        if let NetSource::Fd(fds) = &card.source {
            return Err(PlugError::Descriptors(fds.clone()));
        }
        self.check_plugged(&card.id, card.backend().is_some())?;
        let config = with_net(self.config(), card);
        config.validate().map_err(PlugError::Config)?;
        let (info, device) = OpenedCard::open(card)?.into_device(self.executor.handle())?;
        let id = DeviceId::new(info.id.clone());
        let (slot, transport) = slots.attach(&id, device)?;
        self.transports.push((id, transport));
        self.cards.push(info);
        self.config = config;
        slots.announce(slot);
        Ok(())
    }

    /// Checks what only a plugged device needs: a name that stays, and for a backend (`shares`) guest
    /// memory that another process can map.
    pub(crate) fn check_plugged(&self, id: &str, shares: bool) -> Result<(), PlugError> {
        if id.is_empty() {
            return Err(PlugError::NoName);
        }
        match shares && !is_shared(&self.memory) {
            true => Err(PlugError::PrivateMemory(id.to_owned())),
            false => Ok(()),
        }
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
