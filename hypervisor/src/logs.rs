//! Logs, on standard error.

use anyhow::Context;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Says what is logged: a level, or levels per module.
const VARIABLE: &str = "CUBE_LOG";

/// Starts logging, as `CUBE_LOG` wants it; warnings and errors without it. Once, in `main`.
pub fn start() -> anyhow::Result<()> {
    let wanted = match std::env::var(VARIABLE) {
        Ok(wanted) => wanted,
        Err(_) => "warn".to_owned(),
    };
    let filter = parse(&wanted)?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    tracing_subscriber::registry().with(lines).with(filter).init();
    Ok(())
}

// Not EnvFilter: its regular expressions were a sixth of the whole program.
fn parse(wanted: &str) -> anyhow::Result<Targets> {
    wanted.parse().with_context(|| {
        format!(
            "{VARIABLE} is {wanted:?}; use error, warn, info, debug or trace, or levels per module \
             such as warn,devices=debug"
        )
    })
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn levels_are_for_all_or_for_one_module() {
        let filter = parse("warn,devices=debug").unwrap();
        assert!(filter.would_enable("hypervisor::vm", &Level::WARN));
        assert!(!filter.would_enable("hypervisor::vm", &Level::INFO));
        assert!(filter.would_enable("devices::virtio", &Level::DEBUG));
    }

    #[test]
    fn what_is_no_level_is_named_with_the_cure() {
        let error = parse("devices=loud").unwrap_err().to_string();
        assert!(error.contains("devices=loud") && error.contains("error, warn"), "{error}");
    }
}
