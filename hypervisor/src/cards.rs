//! Network cards on their way into a VM: what they are connected to is opened first, then made into a
//! device.

use devices::executor::ExecutorHandle;
use devices::ids::DeviceId;
use devices::virtio::VirtioDevice;
use devices::virtio::net::{DataPath, Net, NetConfig, NetOption, NetSource, Tap};
use devices::virtio::vhost::user::{PATIENCE, VhostUserConfig};
use serde::{Deserialize, Serialize};

use crate::builder::BuildError;

/// What a VM tells of a network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardInfo {
    /// The device's name.
    pub id: String,
    /// Who moves its frames.
    pub path: DataPath,
    /// The interface of the host, or the socket of the backend.
    pub to: String,
    /// Queue pairs.
    pub queues: u16,
}

/// A card whose interface is there, and is not in a VM yet.
pub struct OpenedCard {
    config: NetConfig,
    taps: Vec<Tap>,
    option: NetOption,
}

impl OpenedCard {
    /// Opens the interface of a card that has a name. A backend is connected to later.
    pub fn open(option: &NetOption) -> Result<Self, BuildError> {
        let config = option.config(DeviceId::new(option.id.clone()));
        Ok(Self { config, taps: option.open()?, option: option.clone() })
    }

    /// The device, and what is told of it. Connects to a backend, and waits for its answers.
    pub fn into_device(
        self,
        executor: ExecutorHandle,
    ) -> Result<(CardInfo, Box<dyn VirtioDevice>), BuildError> {
        let Self { config, taps, option } = self;
        let id = option.id.clone();
        let opened = u16::try_from(taps.len()).unwrap_or(u16::MAX);
        let (queues, to) = match &option.source {
            NetSource::VhostUser(socket) => {
                (option.queues.unwrap_or(1), socket.display().to_string())
            }
            _ => (opened, taps.first().map_or("", Tap::name).to_owned()),
        };
        let card = match option.source {
            NetSource::VhostUser(socket) => {
                let options = VhostUserConfig { socket, queues, patience: PATIENCE };
                Net::with_backend(executor, options, config)?
            }
            _ if option.vhost => Net::with_kernel(executor, taps, config)?,
            _ => Net::new(executor, taps, config)?,
        };
        let info = CardInfo { id, path: card.data_path(), to, queues };
        Ok((info, Box::new(card)))
    }
}
