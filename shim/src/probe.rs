//! What tells that a workload serves again: a port that takes connections, or a page that is there.

use std::fmt;
use std::net::IpAddr;

/// One thing that must answer before a resume is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// `tcp:PORT`: something takes a connection.
    Tcp(u16),
    /// `http:PORT/PATH`: a GET is answered with success, after redirections if need be.
    Http {
        /// Where the server listens.
        port: u16,
        /// What it is asked for, from the slash on.
        path: String,
    },
}

/// Seconds that a server may take for one answer; it is asked again.
const ANSWERS_WITHIN: u32 = 5;

/// What a path may have besides letters and digits: nothing that a shell would take for its own.
const IN_PATHS: &[u8] = b"/.-_~?&=%+,:@";

impl Probe {
    /// The probe that a text asks for; `None` if it is none.
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, rest) = text.split_once(':')?;
        let (port, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let port = port.parse().ok().filter(|port| *port != 0)?;
        match kind {
            "tcp" if path.is_empty() => Some(Self::Tcp(port)),
            "http" if path.bytes().all(|b| b.is_ascii_alphanumeric() || IN_PATHS.contains(&b)) => {
                let path = if path.is_empty() { "/" } else { path };
                Some(Self::Http { port, path: path.to_owned() })
            }
            _ => None,
        }
    }

    /// What a shell in the guest does to see whether it answers at one of these addresses.
    pub fn script(&self, addresses: &[IpAddr]) -> String {
        let tries = addresses.iter().map(|address| match self {
            Self::Tcp(port) => format!("nc -w 1 {address} {port} -e /bin/true 2>/dev/null"),
            Self::Http { port, path } => {
                let host = match address {
                    IpAddr::V4(address) => address.to_string(),
                    IpAddr::V6(address) => format!("[{address}]"),
                };
                let get = format!("wget -q -O /dev/null 'http://{host}:{port}{path}'");
                format!("timeout {ANSWERS_WITHIN} {get} 2>/dev/null")
            }
        });
        tries.collect::<Vec<_>>().join(" || ")
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(port) => write!(f, "nothing in the guest answers at TCP port {port}"),
            Self::Http { port, path } => {
                write!(f, "no server in the guest answers with success at port {port} for {path}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(port: u16, path: &str) -> Option<Probe> {
        Some(Probe::Http { port, path: path.to_owned() })
    }

    #[test]
    fn what_can_be_asked_for() {
        assert_eq!(Probe::parse("tcp:80"), Some(Probe::Tcp(80)));
        assert_eq!(Probe::parse("http:80"), http(80, "/"));
        assert_eq!(Probe::parse("http:8080/a/b?c=d%20e"), http(8080, "/a/b?c=d%20e"));
        for text in [
            "80",
            "tcp:0",
            "tcp:80/",
            "tcp:80;reboot",
            "http:",
            "http:x/",
            "http:80/a'b",
            "http:80/$(reboot)",
            "http:80/a b",
            "https:443/",
            "http:80?x",
        ] {
            assert_eq!(Probe::parse(text), None, "{text}");
        }
    }

    #[test]
    fn any_address_of_the_pod_will_do() {
        let addresses = ["127.0.0.1".parse().unwrap(), "fd00::2".parse().unwrap()];
        let script = Probe::Tcp(80).script(&addresses);
        assert!(script.contains("nc -w 1 127.0.0.1 80"), "{script}");
        assert!(script.contains("|| nc -w 1 fd00::2 80"), "{script}");
        let script = http(80, "/health").unwrap().script(&addresses);
        assert!(script.contains("'http://127.0.0.1:80/health'"), "{script}");
        assert!(script.contains("'http://[fd00::2]:80/health'"), "{script}");
    }
}
