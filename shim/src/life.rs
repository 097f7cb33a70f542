//! Where the VM of a sandbox is in its life. All changes are here; whatever fails, there is either a
//! VM that runs or a whole snapshot on the disk, until the sandbox is over.
//!
//! ```text
//!             boot            fall asleep                  sleep
//!   Unborn ─────────► Awake ──────────────► FallingAsleep ───────► Asleep ◄────────┐
//!                       ▲ ◄───────────────────────┘                  │             │
//!                       │        stay awake: it could not be saved   │ wake        │ sleep on: no VM
//!                       │                                            ▼             │ could be made
//!                       └───────────────────────────────────────── Waking ─────────┘
//!                                       woken
//!   any ── end ──► Over
//! ```
//!
//! A VM that ends by itself stays where it is in this picture; it no longer lives.

use tokio::sync::watch;

use crate::error::{Error, Result};

/// Where it is. `V` is a VM, `B` a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Phase<V, B> {
    /// No container has been made yet.
    #[default]
    Unborn,
    /// There is a VM.
    Awake(V),
    /// There is one, whose state is being written.
    FallingAsleep(V),
    /// Its state is on the disk, and there is none.
    Asleep(B),
    /// One is being made of that state, which is still there.
    Waking(B),
    /// There is neither.
    Over,
}

/// What happens to it.
#[derive(Clone, Debug)]
pub enum Step<V, B> {
    /// A VM has been booted.
    Boot(V),
    /// It shall be saved.
    FallAsleep,
    /// It could not be.
    StayAwake,
    /// It has been, all of it.
    Sleep(B),
    /// It shall go on.
    Wake,
    /// It could not.
    SleepOn,
    /// It does, in this VM.
    Woken(V),
    /// Nobody wants it any more.
    End,
}

impl<V: Clone, B: Clone> Phase<V, B> {
    /// Where it is after a step; `None` if that is not legal.
    fn after(&self, step: &Step<V, B>) -> Option<Self> {
        Some(match (self, step) {
            (_, Step::End) => Self::Over,
            (Self::Unborn, Step::Boot(vm)) | (Self::Waking(_), Step::Woken(vm)) => {
                Self::Awake(vm.clone())
            }
            (Self::Awake(vm), Step::FallAsleep) => Self::FallingAsleep(vm.clone()),
            (Self::FallingAsleep(vm), Step::StayAwake) => Self::Awake(vm.clone()),
            (Self::FallingAsleep(_), Step::Sleep(bed)) => Self::Asleep(bed.clone()),
            (Self::Asleep(bed), Step::Wake) => Self::Waking(bed.clone()),
            (Self::Waking(bed), Step::SleepOn) => Self::Asleep(bed.clone()),
            _ => return None,
        })
    }

    /// In words.
    fn name(&self) -> &'static str {
        match self {
            Self::Unborn => "not started",
            Self::Awake(_) => "running",
            Self::FallingAsleep(_) => "being paused",
            Self::Asleep(_) => "paused to disk",
            Self::Waking(_) => "being resumed",
            Self::Over => "over",
        }
    }
}

/// The life of one sandbox's VM.
#[derive(Debug)]
pub struct Life<V, B>(watch::Sender<Phase<V, B>>);

impl<V, B> Default for Life<V, B> {
    fn default() -> Self {
        Self(watch::Sender::new(Phase::Unborn))
    }
}

impl<V: Clone, B: Clone> Life<V, B> {
    /// Where it is.
    pub fn now(&self) -> Phase<V, B> {
        self.0.borrow().clone()
    }

    /// Takes a step, and tells where that leads.
    pub fn take(&self, step: &Step<V, B>) -> Result<Phase<V, B>> {
        let mut refused = None;
        self.0.send_if_modified(|phase| match phase.after(step) {
            Some(next) => {
                *phase = next;
                true
            }
            None => {
                refused = Some(phase.name());
                false
            }
        });
        match refused {
            None => Ok(self.now()),
            Some(name) => Err(Error::State(format!("the sandbox is {name}"))),
        }
    }

    /// The VM, be it that it is being saved.
    pub fn vm(&self) -> Option<V> {
        match self.now() {
            Phase::Awake(vm) | Phase::FallingAsleep(vm) => Some(vm),
            _ => None,
        }
    }

    /// Whether its state is on the disk, and no VM there that counts.
    pub fn is_asleep(&self) -> bool {
        matches!(*self.0.borrow(), Phase::Asleep(_) | Phase::Waking(_))
    }

    /// Waits while it is asleep, or about to be.
    pub async fn awake(&self) -> Phase<V, B> {
        let mut seen = self.0.subscribe();
        let rests = |phase: &Phase<V, B>| {
            matches!(phase, Phase::FallingAsleep(_) | Phase::Asleep(_) | Phase::Waking(_))
        };
        // Cannot fail while the sender, this life, is there.
        let _ = seen.wait_for(|phase| !rests(phase)).await;
        self.now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Told = Phase<u8, u8>;

    fn life(steps: &[Step<u8, u8>]) -> Life<u8, u8> {
        let life = Life::default();
        for step in steps {
            life.take(step).unwrap();
        }
        life
    }

    #[test]
    fn a_vm_that_cannot_be_saved_runs_on() {
        let life = life(&[Step::Boot(1), Step::FallAsleep, Step::StayAwake]);
        assert_eq!(life.now(), Told::Awake(1));
    }

    #[test]
    fn a_snapshot_that_no_vm_could_be_made_of_is_kept() {
        let life = life(&[Step::Boot(1), Step::FallAsleep, Step::Sleep(7), Step::Wake]);
        assert_eq!((life.now(), life.vm()), (Told::Waking(7), None));
        life.take(&Step::SleepOn).unwrap();
        assert_eq!(life.now(), Told::Asleep(7));
        life.take(&Step::Wake).unwrap();
        life.take(&Step::Woken(2)).unwrap();
        assert_eq!(life.vm(), Some(2));
    }

    #[test]
    fn there_is_never_neither_before_the_end() {
        let all = [
            Step::Boot(1),
            Step::FallAsleep,
            Step::StayAwake,
            Step::Sleep(7),
            Step::Wake,
            Step::SleepOn,
            Step::Woken(2),
        ];
        // All paths of six steps.
        let mut seen = vec![Told::Unborn];
        for _ in 0..6 {
            let next =
                seen.iter().flat_map(|phase| all.iter().filter_map(|step| phase.after(step)));
            let next: Vec<Told> = next.collect();
            assert!(next.iter().all(|phase| !matches!(phase, Told::Unborn | Told::Over)));
            seen = next;
        }
        assert!(!seen.is_empty());
    }

    #[test]
    fn what_is_not_legal_is_refused_and_changes_nothing() {
        let life = life(&[Step::Boot(1)]);
        let error = life.take(&Step::Wake).unwrap_err().to_string();
        assert_eq!(error, "the sandbox is running");
        life.take(&Step::FallAsleep).unwrap();
        assert!(life.take(&Step::FallAsleep).is_err());
        assert_eq!(life.now(), Told::FallingAsleep(1));
        life.take(&Step::End).unwrap();
        assert!(life.take(&Step::Wake).unwrap_err().to_string().ends_with("is over"));
    }

    #[tokio::test]
    async fn who_waits_for_a_vm_waits_through_its_sleep() {
        let life = life(&[Step::Boot(1), Step::FallAsleep, Step::Sleep(7)]);
        let woken = async {
            tokio::task::yield_now().await;
            life.take(&Step::Wake).unwrap();
            tokio::task::yield_now().await;
            life.take(&Step::Woken(2)).unwrap();
        };
        let (phase, ()) = tokio::join!(life.awake(), woken);
        assert_eq!(phase, Told::Awake(2));
    }
}
