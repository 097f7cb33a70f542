//! What is said about a network card: by the builder, and as text on the command line.

use std::fmt;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::tap::{Tap, TapError};
use crate::ids::DeviceId;
use crate::rate_limiter::{RateError, RateLimit};

/// Queue pairs at most.
pub const MAX_QUEUE_PAIRS: u16 = 8;

/// Smallest MTU (virtio 1.3, section 5.1.4.1).
pub const MIN_MTU: u16 = 68;

// --- addresses ---------------------------------------------------------------------------------

/// The hardware address of a card: unicast and not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

/// Why an address cannot be that of a card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MacError {
    /// Not six pairs of hexadecimal digits.
    #[error("MAC address {0:?} is not of the form 02:00:00:00:00:01")]
    Format(String),
    /// A group, or nobody.
    #[error(
        "MAC address {0} is a group address or zero; use one whose first byte is even, such as \
         02:00:00:00:00:01"
    )]
    NotUnicast(String),
}

impl MacAddress {
    /// An address from its bytes; groups and zero are refused.
    pub fn new(bytes: [u8; 6]) -> Result<Self, MacError> {
        let address = Self(bytes);
        match bytes {
            [0, 0, 0, 0, 0, 0] => Err(MacError::NotUnicast(address.to_string())),
            [first, ..] if first & 1 != 0 => Err(MacError::NotUnicast(address.to_string())),
            _ => Ok(address),
        }
    }

    /// The bytes, in the order of the wire.
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }

    /// A locally administered address that is always the same for the same `names`.
    pub fn derived(names: &[&str]) -> Self {
        // FNV-1a, with a byte between the names that is in none of them.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for name in names {
            for byte in name.bytes().chain([0xff]) {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        // The upper half depends on the names more evenly than the lower.
        let [a, b, c, d, e, f, _, _] = (hash ^ (hash << 16)).to_be_bytes();
        Self([(a & 0xfc) | 2, b, c, d, e, f])
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, MacError> {
        let format = || MacError::Format(text.to_owned());
        let mut bytes = [0; 6];
        let mut pairs = text.split(':');
        for byte in &mut bytes {
            let pair = pairs.next().ok_or_else(format)?;
            let digits = pair.len() == 2 && pair.bytes().all(|digit| digit.is_ascii_hexdigit());
            *byte = u8::from_str_radix(pair, 16).ok().filter(|_| digits).ok_or_else(format)?;
        }
        match pairs.next() {
            None => Self::new(bytes),
            Some(_) => Err(format()),
        }
    }
}

impl TryFrom<String> for MacAddress {
    type Error = MacError;
    fn try_from(text: String) -> Result<Self, MacError> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(address: MacAddress) -> String {
        address.to_string()
    }
}

// --- the card ----------------------------------------------------------------------------------

/// What the builder says about a card. There are as many queue pairs as it is given TAP queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// Its name in this VM.
    pub id: DeviceId,
    /// Its hardware address; `None`: one derived from its name and that of the interface.
    pub mac: Option<MacAddress>,
    /// What the guest is told to use, in bytes without the Ethernet header; `None`: not told.
    pub mtu: Option<u16>,
    /// Limits of what the guest receives.
    pub rx: RateLimit,
    /// Limits of what the guest sends.
    pub tx: RateLimit,
}

impl NetConfig {
    /// A card without anything special.
    pub fn new(id: DeviceId) -> Self {
        Self { id, mac: None, mtu: None, rx: RateLimit::default(), tx: RateLimit::default() }
    }
}

// --- as text -----------------------------------------------------------------------------------

/// What a card is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetSource {
    /// The interface of this name: attached to, or created.
    Tap(String),
    /// Descriptors that this process has inherited, one per queue pair.
    Fd(Vec<RawFd>),
    /// A vhost-user backend that listens at this Unix socket.
    #[serde(rename = "vhost-user")]
    VhostUser(PathBuf),
}

/// A card as the user describes it: `tap=NAME` or `fd=N[:N…]`, and optionally `vhost=on`, `mac=`,
/// `mtu=`, `id=`, `queues=` (pairs), `rx_bytes=`, `rx_frames=`, `tx_bytes=` and `tx_frames=` (rates);
/// or `vhost-user=SOCKET`, and of the others those that are not rates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetOption {
    /// What it is connected to.
    pub source: NetSource,
    /// Its name; empty: chosen by position.
    #[serde(default)]
    pub id: String,
    /// Its hardware address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// Its MTU in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Queue pairs; `None`: one, or as many as there are descriptors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// The host's kernel moves the frames, past this process.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vhost: bool,
    /// Limits of what the guest receives.
    #[serde(default, skip_serializing_if = "RateLimit::is_none")]
    pub rx: RateLimit,
    /// Limits of what the guest sends.
    #[serde(default, skip_serializing_if = "RateLimit::is_none")]
    pub tx: RateLimit,
}

/// Why a description of a card makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetOptionError {
    /// An option that does not exist, or has no value.
    #[error(
        "network option {0:?} is not known; use tap=NAME, fd=N or vhost-user=SOCKET, and mac=, \
         mtu=, id=, queues=, vhost=on, rx_bytes=, rx_frames=, tx_bytes=, tx_frames="
    )]
    Unknown(String),
    /// The same option, twice.
    #[error("network option {0}= is given twice; leave one out")]
    Twice(String),
    /// Connected to nothing, or to two things.
    #[error("network card {0:?} needs one of tap=NAME, fd=N and vhost-user=SOCKET")]
    Source(String),
    /// A number that is none, or is out of range.
    #[error("network option {option}={value} is not a number from {least} to {most}")]
    Number {
        /// The option.
        option: &'static str,
        /// What was given.
        value: String,
        /// Smallest value that is possible.
        least: u32,
        /// Largest.
        most: u32,
    },
    /// More descriptors, or fewer, than queue pairs.
    #[error(
        "network option fd= has {fds} descriptors for queues={queues}; give one per queue pair"
    )]
    Descriptors {
        /// Descriptors.
        fds: usize,
        /// Queue pairs.
        queues: u16,
    },
    /// Neither on nor off.
    #[error("network option vhost={0:?} is neither on nor off")]
    Vhost(String),
    /// The kernel in the place of a process that is in our place.
    #[error("network option vhost=on is for tap= and fd=; leave it out beside vhost-user=")]
    VhostTwice,
    /// Limits that nobody would keep.
    #[error(
        "network option {limit} cannot be beside {path}: the frames do not pass through cube-vmm; \
         leave one of them out, or limit the interface on the host (tc)"
    )]
    Unlimited {
        /// The limit.
        limit: &'static str,
        /// What the frames go through.
        path: &'static str,
    },
    /// A name with which nothing can be called.
    #[error("network card id {0:?} is not 1 to 20 letters, digits, '-' or '_'; choose another")]
    Id(String),
    /// A bad hardware address.
    #[error(transparent)]
    Mac(#[from] MacError),
    /// A bad rate.
    #[error(transparent)]
    Rate(#[from] RateError),
}

impl NetOption {
    /// A card on the interface `name`, without anything special.
    pub fn tap(name: impl Into<String>) -> Self {
        Self::on(NetSource::Tap(name.into()))
    }

    fn on(source: NetSource) -> Self {
        Self {
            source,
            id: String::new(),
            mac: None,
            mtu: None,
            queues: None,
            vhost: false,
            rx: RateLimit::default(),
            tx: RateLimit::default(),
        }
    }

    /// Opens the TAP that it is connected to: a queue per queue pair. None for a backend.
    pub fn open(&self) -> Result<Vec<Tap>, TapError> {
        match &self.source {
            NetSource::Tap(name) => Tap::open_named(name, self.queues.unwrap_or(1), self.mtu),
            NetSource::Fd(fds) => fds.iter().map(|&fd| Tap::from_inherited(fd)).collect(),
            NetSource::VhostUser(_) => Ok(Vec::new()),
        }
    }

    /// The socket of its backend, if it has one.
    pub fn backend(&self) -> Option<&Path> {
        match &self.source {
            NetSource::VhostUser(socket) => Some(socket),
            NetSource::Tap(_) | NetSource::Fd(_) => None,
        }
    }

    /// Refuses what the way of the frames makes impossible.
    fn check_path(&self) -> Result<(), NetOptionError> {
        let path = match (self.backend().is_some(), self.vhost) {
            (true, true) => return Err(NetOptionError::VhostTwice),
            (true, false) => "vhost-user=",
            (false, true) => "vhost=on",
            (false, false) => return Ok(()),
        };
        let limits = [
            (self.rx.bytes.is_some(), "rx_bytes="),
            (self.rx.operations.is_some(), "rx_frames="),
            (self.tx.bytes.is_some(), "tx_bytes="),
            (self.tx.operations.is_some(), "tx_frames="),
        ];
        match limits.into_iter().find(|&(given, _)| given) {
            Some((_, limit)) => Err(NetOptionError::Unlimited { limit, path }),
            None => Ok(()),
        }
    }

    /// The configuration of the card, under the name `id`.
    pub fn config(&self, id: DeviceId) -> NetConfig {
        NetConfig { id, mac: self.mac, mtu: self.mtu, rx: self.rx, tx: self.tx }
    }

    /// What cannot be seen from one option alone. Also for those that were not read from text.
    pub fn validate(&self) -> Result<(), NetOptionError> {
        let pairs = u32::from(self.queues.unwrap_or(1));
        number("queues", &pairs.to_string(), 1, u32::from(MAX_QUEUE_PAIRS))?;
        if let Some(mtu) = self.mtu {
            number("mtu", &mtu.to_string(), u32::from(MIN_MTU), u32::from(u16::MAX))?;
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if self.id.len() > 20 || !self.id.chars().all(allowed) {
            return Err(NetOptionError::Id(self.id.clone()));
        }
        self.check_path()?;
        let NetSource::Fd(fds) = &self.source else {
            return Ok(());
        };
        let possible = fds.len().clamp(1, usize::from(MAX_QUEUE_PAIRS)) as u16;
        let queues = self.queues.unwrap_or(possible);
        match usize::from(queues) == fds.len() {
            true => Ok(()),
            false => Err(NetOptionError::Descriptors { fds: fds.len(), queues }),
        }
    }
}

fn number(option: &'static str, value: &str, least: u32, most: u32) -> Result<u32, NetOptionError> {
    match value.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(NetOptionError::Number { option, value: value.to_owned(), least, most }),
    }
}

fn short(option: &'static str, value: &str, least: u16, most: u16) -> Result<u16, NetOptionError> {
    let number = number(option, value, u32::from(least), u32::from(most))?;
    // Not above `most`.
    Ok(u16::try_from(number).unwrap_or(most))
}

fn on_or_off(value: &str) -> Result<bool, NetOptionError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(NetOptionError::Vhost(value.to_owned())),
    }
}

fn descriptors(value: &str) -> Result<Vec<RawFd>, NetOptionError> {
    let fd = |text| number("fd", text, 0, i32::MAX as u32).map(|fd| fd as RawFd);
    value.split(':').map(fd).collect()
}

impl FromStr for NetOption {
    type Err = NetOptionError;

    fn from_str(text: &str) -> Result<Self, NetOptionError> {
        let mut source = None;
        let mut card = Self::on(NetSource::Fd(Vec::new()));
        let mut seen = Vec::new();
        for option in text.split(',') {
            let unknown = || NetOptionError::Unknown(option.to_owned());
            let (key, value) = option.split_once('=').ok_or_else(unknown)?;
            if value.is_empty() {
                return Err(unknown());
            }
            if seen.contains(&key) {
                return Err(NetOptionError::Twice(key.to_owned()));
            }
            seen.push(key);
            match key {
                "tap" | "fd" | "vhost-user" if source.is_some() => {
                    return Err(NetOptionError::Source(text.to_owned()));
                }
                "tap" => source = Some(NetSource::Tap(value.to_owned())),
                "fd" => source = Some(NetSource::Fd(descriptors(value)?)),
                "vhost-user" => source = Some(NetSource::VhostUser(value.into())),
                "vhost" => card.vhost = on_or_off(value)?,
                "id" => card.id = value.to_owned(),
                "mac" => card.mac = Some(value.parse()?),
                "mtu" => card.mtu = Some(short("mtu", value, MIN_MTU, u16::MAX)?),
                "queues" => card.queues = Some(short("queues", value, 1, MAX_QUEUE_PAIRS)?),
                "rx_bytes" => card.rx.bytes = Some(value.parse()?),
                "rx_frames" => card.rx.operations = Some(value.parse()?),
                "tx_bytes" => card.tx.bytes = Some(value.parse()?),
                "tx_frames" => card.tx.operations = Some(value.parse()?),
                _ => return Err(unknown()),
            }
        }
        card.source = source.ok_or_else(|| NetOptionError::Source(text.to_owned()))?;
        card.validate()?;
        Ok(card)
    }
}

#[cfg(test)]
#[path = "tests/config.rs"]
mod tests;
