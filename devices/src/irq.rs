//! An interrupt line as a value: whoever holds one may raise it, and needs to know nothing else.

use std::fmt;
use std::sync::Arc;

use crate::event::Event;

/// One edge-triggered interrupt. Cheap to clone; every clone raises the same line.
#[derive(Clone)]
pub struct Interrupt(Line);

#[derive(Clone)]
enum Line {
    None,
    Event(Event),
    Fn(Arc<dyn Fn() + Send + Sync>),
}

impl Interrupt {
    /// An interrupt that signals `event`, which the VMM has bound to a GSI with `KVM_IRQFD`.
    pub fn from_event(event: Event) -> Self {
        Self(Line::Event(event))
    }

    /// An interrupt that runs `raise`; it is called on the raising thread and must not block.
    pub fn from_fn(raise: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Line::Fn(Arc::new(raise)))
    }

    /// A line that is connected to nothing.
    pub fn none() -> Self {
        Self(Line::None)
    }

    /// Raises one edge. Never blocks.
    pub fn raise(&self) {
        match &self.0 {
            Line::None => {}
            Line::Event(event) => event.signal(),
            Line::Fn(raise) => raise(),
        }
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Line::None => "Interrupt(none)",
            Line::Event(_) => "Interrupt(event)",
            Line::Fn(_) => "Interrupt(fn)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_clone_signals_the_event() {
        let event = Event::new().unwrap();
        let line = Interrupt::from_event(event.clone());
        line.raise();
        line.clone().raise();
        assert_eq!(event.clear(), 2);
    }
}
