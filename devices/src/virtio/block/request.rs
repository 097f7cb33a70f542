//! Requests of the driver, from bytes to checked commands (virtio 1.3, section 5.2.6). Pure: no
//! guest memory, no disk.

use super::disk::{Extent, SECTOR_SIZE};

/// The header at the start of each request.
pub const HEADER_SIZE: usize = 16;
/// One range of a discard or write-zeroes request.
pub const RANGE_SIZE: usize = 16;
/// Bytes of an identity, padded with zeroes.
pub const SERIAL_LEN: usize = 20;
/// Ranges of one discard or write-zeroes request at most.
pub const MAX_RANGES: usize = 16;
/// Sectors of one such range at most: 1 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 21;

const UNMAP: u32 = 1;

/// Request types.
pub mod kind {
    /// Read sectors.
    pub const IN: u32 = 0;
    /// Write sectors.
    pub const OUT: u32 = 1;
    /// Flush the cache.
    pub const FLUSH: u32 = 4;
    /// Read the identity.
    pub const GET_ID: u32 = 8;
    /// Discard ranges.
    pub const DISCARD: u32 = 11;
    /// Zero ranges.
    pub const WRITE_ZEROES: u32 = 13;
}

/// The byte with which a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Failed, or not allowed here.
    IoError = 1,
    /// Not a request of this device.
    Unsupported = 2,
}

/// What requests are checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Capacity in sectors.
    pub sectors: u64,
    /// Whatever changes the disk is refused, also of a driver that has not accepted F_RO.
    pub read_only: bool,
}

/// A request whose header was checked; its data part is `len` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read from the disk into the data part.
    Read(Extent),
    /// Write the data part to the disk.
    Write(Extent),
    /// Flush.
    Flush,
    /// Write the identity into the data part.
    GetId,
    /// Discard the ranges in the data part.
    Discard,
    /// Zero the ranges in the data part.
    WriteZeroes,
}

/// Checks a request: its header, `out_len` readable bytes after it, `in_len` writable bytes before
/// the status byte.
pub fn parse(
    header: [u8; HEADER_SIZE],
    out_len: u64,
    in_len: u64,
    limits: Limits,
) -> Result<Command, Status> {
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let sector = u64::from_le_bytes(sector);
    let writable = if limits.read_only { Err(Status::IoError) } else { Ok(()) };
    match u32::from_le_bytes([t0, t1, t2, t3]) {
        kind::IN => Ok(Command::Read(extent(sector, in_len, limits)?)),
        kind::OUT => {
            writable?;
            Ok(Command::Write(extent(sector, out_len, limits)?))
        }
        kind::FLUSH => Ok(Command::Flush),
        kind::GET_ID => Ok(Command::GetId),
        kind::DISCARD => writable.and(range_count(out_len)).map(|_| Command::Discard),
        kind::WRITE_ZEROES => writable.and(range_count(out_len)).map(|_| Command::WriteZeroes),
        _ => Err(Status::Unsupported),
    }
}

/// The extent of `len` bytes at `sector`, if it is whole sectors within the capacity.
fn extent(sector: u64, len: u64, limits: Limits) -> Result<Extent, Status> {
    let end = sector.checked_add(len / SECTOR_SIZE).ok_or(Status::IoError)?;
    if !len.is_multiple_of(SECTOR_SIZE) || end > limits.sectors {
        return Err(Status::IoError);
    }
    let offset = sector.checked_mul(SECTOR_SIZE).ok_or(Status::IoError)?;
    Ok(Extent { offset, len })
}

fn range_count(len: u64) -> Result<usize, Status> {
    let count = usize::try_from(len).map_err(|_| Status::IoError)? / RANGE_SIZE;
    let whole = len.is_multiple_of(RANGE_SIZE as u64);
    if whole && (1..=MAX_RANGES).contains(&count) { Ok(count) } else { Err(Status::IoError) }
}

/// The ranges of a discard or write-zeroes request; those of no sectors are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges {
    /// Which bytes, each checked.
    pub extents: Vec<Extent>,
    /// All of them may be unmapped (write-zeroes only).
    pub unmap: bool,
}

/// Checks the data part of a discard or write-zeroes request.
///
/// Ranges are in sectors; any start is accepted, since `discard_sector_alignment` is a hint (virtio
/// 1.3, section 5.2.4) that Linux does not always follow.
pub fn ranges(data: &[u8], command: Command, limits: Limits) -> Result<Ranges, Status> {
    range_count(data.len() as u64)?;
    let mut found = Ranges { extents: Vec::new(), unmap: true };
    for range in data.as_chunks::<RANGE_SIZE>().0 {
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = *range;
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
        let flags = u32::from_le_bytes(flags);
        let known = if command == Command::WriteZeroes { UNMAP } else { 0 };
        if flags & !known != 0 {
            // Unknown flags, and unmap with a discard, are unsupported (section 5.2.6.2).
            return Err(Status::Unsupported);
        }
        if sectors > MAX_RANGE_SECTORS {
            return Err(Status::IoError);
        }
        let extent = extent(sector, u64::from(sectors) * SECTOR_SIZE, limits)?;
        // With mixed flags none may be unmapped.
        found.unmap &= flags & UNMAP != 0;
        if extent.len > 0 {
            found.extents.push(extent);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
