//! One operation of a disk as a row of steps, each of which is one call of the host.
//!
//! What has to be done next and what a result means is decided here, once; an engine only carries
//! steps out. So all engines move the same bytes, fall back in the same way and fail alike.

use std::io;

use vmm_sys_util::fallocate::FallocateMode;

use super::disk::{Buffers, Completion, DiskOp, Extent, Tag};
use super::file::DiskFile;

/// Bytes moved by one step.
pub(super) const STEP: usize = 1 << 20;

/// Bytes moved before the caller gets back to its loop.
pub(super) const TURN: usize = 4 << 20;

/// Slices of one step (`IOV_MAX` of Linux).
pub(super) const MAX_SLICES: usize = 1024;

/// What is written where the storage cannot zero a range itself.
pub(super) static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// One call of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// From the disk at `offset` into the buffers, from their byte `skip` on.
    Read { offset: u64, skip: u64 },
    /// The other way round.
    Write { offset: u64, skip: u64 },
    /// The first `len` bytes of [`ZEROES`] to the disk.
    Zeroes { offset: u64, len: usize },
    /// `fallocate`, without changing the size.
    Allocate { mode: Mode, extent: Extent },
    /// Block devices only.
    Discard { extent: Extent },
    /// `fdatasync`.
    Sync,
}

/// [`FallocateMode`], with more traits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    PunchHole,
    ZeroRange,
}

impl Mode {
    pub fn fallocate(self) -> FallocateMode {
        match self {
            Mode::PunchHole => FallocateMode::PunchHole,
            Mode::ZeroRange => FallocateMode::ZeroRange,
        }
    }

    /// The flags of fallocate(2).
    pub fn flags(self) -> i32 {
        let mode = match self {
            Mode::PunchHole => libc::FALLOC_FL_PUNCH_HOLE,
            Mode::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
        };
        mode | libc::FALLOC_FL_KEEP_SIZE
    }
}

/// A way to do something with an extent.
#[derive(Clone, Copy)]
enum Method {
    Allocate(Mode),
    Discard,
    ByHand,
}

/// An operation that is under way.
#[derive(Debug)]
pub(super) struct Job {
    tag: Tag,
    op: DiskOp,
    /// Bytes of the buffers that were moved, without a gap.
    moved: u64,
    /// Extent that is being worked on.
    extent: usize,
    /// Bytes of it that were zeroed by hand.
    zeroed: u64,
    /// Ways that the storage does not know.
    refused: usize,
    synced: bool,
}

impl Job {
    pub fn new(tag: Tag, op: DiskOp) -> Self {
        Self { tag, op, moved: 0, extent: 0, zeroed: 0, refused: 0, synced: false }
    }

    /// The memory that it reads or writes.
    pub fn buffers(&self) -> Option<&Buffers> {
        match &self.op {
            DiskOp::Read { buffers, .. } | DiskOp::Write { buffers, .. } => Some(buffers),
            DiskOp::Flush | DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } => None,
        }
    }

    /// What has to be done next on `disk`; `None` when all is done.
    pub fn next(&self, disk: &DiskFile) -> io::Result<Option<Step>> {
        let read_only = disk.geometry().read_only;
        match &self.op {
            DiskOp::Read { offset, buffers } => {
                let step = Step::Read { offset: *offset, skip: self.moved };
                Ok((self.moved < buffers.len()).then_some(step))
            }
            // Nothing of ours can be dirty on a disk that we do not write.
            DiskOp::Flush => Ok(self.sync(!read_only)),
            _ if read_only => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            DiskOp::Write { offset, buffers, durable } => match self.moved < buffers.len() {
                true => Ok(Some(Step::Write { offset: *offset, skip: self.moved })),
                false => Ok(self.sync(*durable)),
            },
            DiskOp::Discard { extents, durable } | DiskOp::WriteZeroes { extents, durable, .. } => {
                match extents.get(self.extent) {
                    Some(extent) => self.on_extent(*extent, disk.is_block_device()).map(Some),
                    None => Ok(self.sync(*durable)),
                }
            }
        }
    }

    fn sync(&self, wanted: bool) -> Option<Step> {
        (wanted && !self.synced).then_some(Step::Sync)
    }

    /// The ways to do it, best first.
    fn methods(&self, block_device: bool) -> &'static [Method] {
        use Method::{Allocate, ByHand, Discard};
        use Mode::{PunchHole, ZeroRange};
        match &self.op {
            // Punching a hole into a device zeroes it, which may take as long as writing it.
            DiskOp::Discard { .. } if block_device => &[Discard],
            DiskOp::Discard { .. } => &[Allocate(PunchHole)],
            DiskOp::WriteZeroes { unmap: true, .. } => {
                &[Allocate(PunchHole), Allocate(ZeroRange), ByHand]
            }
            _ => &[Allocate(ZeroRange), ByHand],
        }
    }

    fn on_extent(&self, extent: Extent, block_device: bool) -> io::Result<Step> {
        match self.methods(block_device).get(self.refused) {
            Some(Method::Allocate(mode)) => Ok(Step::Allocate { mode: *mode, extent }),
            Some(Method::Discard) => Ok(Step::Discard { extent }),
            Some(Method::ByHand) => {
                let left = extent.len.saturating_sub(self.zeroed);
                let len = usize::try_from(left).unwrap_or(usize::MAX).min(ZEROES.len());
                Ok(Step::Zeroes { offset: extent.offset.saturating_add(self.zeroed), len })
            }
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Takes the result of `step`, the number of bytes moved if it moves bytes. An error ends the
    /// job.
    pub fn advance(&mut self, step: Step, result: io::Result<usize>) -> io::Result<()> {
        let moved = match result {
            Ok(moved) => moved,
            Err(error) if is_to_be_repeated(&error) => return Ok(()),
            Err(error) if is_unsupported(&error) => {
                if matches!(step, Step::Allocate { .. } | Step::Discard { .. }) {
                    // What comes next knows whether there is another way.
                    self.refused += 1;
                    return Ok(());
                }
                return Err(io::ErrorKind::Unsupported.into());
            }
            Err(error) => return Err(error),
        };
        match step {
            // The file has been cut since it was opened.
            Step::Read { .. } | Step::Write { .. } if moved == 0 => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Step::Read { .. } | Step::Write { .. } => self.moved += moved as u64,
            Step::Zeroes { .. } if moved == 0 => return Err(io::ErrorKind::WriteZero.into()),
            Step::Zeroes { .. } => {
                self.zeroed += moved as u64;
                let DiskOp::WriteZeroes { extents, .. } = &self.op else { return Ok(()) };
                if extents.get(self.extent).is_none_or(|extent| self.zeroed >= extent.len) {
                    self.extent += 1;
                    self.zeroed = 0;
                }
            }
            Step::Allocate { .. } | Step::Discard { .. } => self.extent += 1,
            Step::Sync => self.synced = true,
        }
        Ok(())
    }

    /// The end of it.
    pub fn complete(self, result: io::Result<()>) -> Completion {
        Completion { tag: self.tag, result, moved: self.moved }
    }
}

/// What a step that moved `moved` bytes counts towards a turn.
pub(super) fn cost(step: Step, moved: usize) -> usize {
    match step {
        Step::Read { .. } | Step::Write { .. } | Step::Zeroes { .. } => moved,
        Step::Allocate { .. } | Step::Discard { .. } => STEP,
        Step::Sync => 0,
    }
}

/// A signal, or the end of the thread that began it: nothing is wrong with the storage.
fn is_to_be_repeated(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::ECANCELED))
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

#[cfg(test)]
mod tests;
