//! Kernel and initrd files: checked before the VM is made, then loaded.
//!
//! The files come from the user and may be anything: an image that is cut, a picture, a directory.
//! The checks here give an error that says so; linux-loader does the loading.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use devices::memory::{GuestAddress, Memory};
use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, Elf, KernelLoader, elf::PvhBootCapability};
use vm_memory::Bytes;

use super::entry::Entry;
use crate::config::BootProtocol;
use crate::layout;

/// What is wrong with a kernel or an initrd.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// It cannot be opened or read.
    #[error("{what} {} cannot be read: {source}; correct the path, or its mode", path.display())]
    Read {
        /// "kernel" or "initrd".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Not a file.
    #[error("{what} {} is not a regular file; name the image itself", path.display())]
    NotAFile {
        /// "kernel" or "initrd".
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// Nothing in it.
    #[error("{what} {} is empty; copy or build it again", path.display())]
    Empty {
        /// "kernel" or "initrd".
        what: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// Not a kernel.
    #[error("kernel {} is neither an x86-64 ELF vmlinux nor a bzImage; name one of these", .0.display())]
    Format(PathBuf),
    /// A part of the file is missing.
    #[error("kernel {} is cut off: it has {len} bytes and needs {needed}; copy or build it again",
            path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// What its headers ask for.
        needed: u64,
    },
    /// Headers that cannot be.
    #[error("kernel {} has a malformed header: {reason}; name a Linux kernel, or build it again",
            path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// It does not fit.
    #[error("{what} {} needs memory up to {end:#x}, the guest has less; use a larger --memory",
            path.display())]
    DoesNotFit {
        /// "kernel" or "initrd".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// End of what it needs, in bytes.
        end: u64,
    },
    /// The protocol that was asked for is not in the kernel.
    #[error("kernel {} has no {protocol} entry; use --boot-protocol auto", path.display())]
    NoEntry {
        /// The file.
        path: PathBuf,
        /// The protocol.
        protocol: &'static str,
    },
}

/// A kernel file that passed the checks.
#[derive(Debug)]
pub struct KernelFile {
    path: PathBuf,
    file: File,
    bzimage: bool,
}

/// A kernel in guest memory.
#[derive(Debug)]
pub struct LoadedKernel {
    /// How and where it is entered.
    pub entry: Entry,
    /// End of what it occupies.
    pub end: u64,
    /// The setup header of a bzImage.
    pub setup_header: Option<setup_header>,
}

fn open(what: &'static str, path: &Path) -> Result<(File, u64), KernelError> {
    let failed = |source| KernelError::Read { what, path: path.to_owned(), source };
    // A pipe that nobody writes to must not hold us up before it is seen to be one.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(KernelError::NotAFile { what, path: path.to_owned() });
    }
    Ok((file, metadata.len()))
}

fn le<const N: usize>(header: &[u8], offset: usize) -> u64 {
    let mut value = [0; 8];
    if let (Some(from), Some(to)) = (header.get(offset..offset + N), value.get_mut(..N)) {
        to.copy_from_slice(from);
    }
    u64::from_le_bytes(value)
}

const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: u64 = 56;
const PT_LOAD: u64 = 1;
const EM_X86_64: u64 = 62;
const BZIMAGE_MAGIC: usize = 0x202;

impl KernelFile {
    /// Opens a kernel and checks that all its headers promise is there.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        let (mut file, len) = open("kernel", path)?;
        let mut header = Vec::with_capacity(1024);
        let read = (&mut file).take(1024).read_to_end(&mut header);
        read.map_err(|source| KernelError::Read { what: "kernel", path: path.into(), source })?;
        let bzimage = match &header {
            header if header.starts_with(b"\x7fELF") => false,
            header if header.get(BZIMAGE_MAGIC..BZIMAGE_MAGIC + 4) == Some(b"HdrS") => true,
            _ => return Err(KernelError::Format(path.to_owned())),
        };
        let mut this = Self { path: path.to_owned(), file, bzimage };
        if bzimage {
            this.check_bzimage(&header, len)?
        } else {
            this.check_elf(&header, len)?
        }
        Ok(this)
    }

    fn malformed(&self, reason: impl Into<String>) -> KernelError {
        KernelError::Malformed { path: self.path.clone(), reason: reason.into() }
    }

    fn truncated(&self, len: u64, needed: u64) -> KernelError {
        KernelError::Truncated { path: self.path.clone(), len, needed }
    }

    fn check_elf(&mut self, header: &[u8], len: u64) -> Result<(), KernelError> {
        if header.len() < ELF_HEADER {
            return Err(self.truncated(len, ELF_HEADER as u64));
        }
        let (class, machine) = (header.get(4).copied(), le::<2>(header, 18));
        if class != Some(2) || machine != EM_X86_64 {
            return Err(KernelError::Format(self.path.clone()));
        }
        let (offset, count) = (le::<8>(header, 32), le::<2>(header, 56));
        if count == 0 || count > 64 {
            return Err(self.malformed(format!("{count} program headers")));
        }
        let table_end = offset.checked_add(count * PROGRAM_HEADER);
        let table_end = table_end.ok_or_else(|| self.malformed("program headers wrap around"))?;
        if table_end > len {
            return Err(self.truncated(len, table_end));
        }
        let mut table = vec![0; (count * PROGRAM_HEADER) as usize];
        let read = self.file.seek(SeekFrom::Start(offset));
        read.and_then(|_| self.file.read_exact(&mut table)).map_err(|source| {
            KernelError::Read { what: "kernel", path: self.path.clone(), source }
        })?;
        let mut entry_is_loaded = false;
        let entry = le::<8>(header, 24);
        for segment in table.chunks_exact(PROGRAM_HEADER as usize) {
            let (kind, offset) = (le::<4>(segment, 0), le::<8>(segment, 8));
            let (address, in_file) = (le::<8>(segment, 24), le::<8>(segment, 32));
            let in_memory = le::<8>(segment, 40);
            let end = offset.checked_add(in_file);
            let end = end.ok_or_else(|| self.malformed("a segment wraps around"))?;
            if end > len {
                return Err(self.truncated(len, end));
            }
            if kind == PT_LOAD {
                let top = address.checked_add(in_memory);
                let top = top.ok_or_else(|| self.malformed("a segment wraps around"))?;
                if in_file > in_memory || address < layout::HIGH_RAM {
                    return Err(self.malformed("a segment is not above the first megabyte"));
                }
                entry_is_loaded |= (address..top).contains(&entry);
            }
        }
        if !entry_is_loaded {
            return Err(self.malformed(format!("entry {entry:#x} is in no segment")));
        }
        Ok(())
    }

    fn check_bzimage(&self, header: &[u8], len: u64) -> Result<(), KernelError> {
        // Linux boot protocol: setup_sects, syssize in 16-byte units, version, xloadflags.
        let sectors = match le::<1>(header, 0x1f1) {
            0 => 4,
            sectors => sectors,
        };
        let needed = (sectors + 1) * 512 + le::<4>(header, 0x1f4) * 16;
        if len < needed {
            return Err(self.truncated(len, needed));
        }
        let (version, load_flags) = (le::<2>(header, 0x206), le::<2>(header, 0x236));
        if version < 0x20c || load_flags & 1 == 0 {
            return Err(KernelError::NoEntry { path: self.path.clone(), protocol: "64-bit" });
        }
        Ok(())
    }

    /// Copies the kernel into guest memory and finds its entry.
    pub fn load(
        mut self,
        memory: &Memory,
        protocol: BootProtocol,
    ) -> Result<LoadedKernel, KernelError> {
        let start = Some(GuestAddress(layout::HIGH_RAM));
        let loaded = if self.bzimage {
            BzImage::load(memory, None, &mut self.file, start)
        } else {
            Elf::load(memory, None, &mut self.file, start)
        };
        let loaded = loaded.map_err(|error| match error {
            // The file was checked, so what failed is the copy into memory that is not there.
            linux_loader::loader::Error::Elf(linux_loader::loader::elf::Error::ReadKernelImage)
            | linux_loader::loader::Error::Bzimage(
                linux_loader::loader::bzimage::Error::ReadBzImageCompressedKernel,
            ) => self.does_not_fit(crate::memory::size(memory)),
            other => self.malformed(other.to_string()),
        })?;
        let end = match &loaded.setup_header {
            // Decompression happens in place and needs init_size bytes.
            Some(header) => loaded.kernel_load.0 + u64::from(header.init_size),
            None => loaded.kernel_end,
        };
        let top = layout::ram_regions(crate::memory::size(memory));
        if top.first().is_none_or(|&(_, len)| end > len) {
            return Err(self.does_not_fit(end));
        }
        let entry = self.entry(&loaded, protocol)?;
        Ok(LoadedKernel { entry, end, setup_header: loaded.setup_header })
    }

    fn does_not_fit(&self, end: u64) -> KernelError {
        KernelError::DoesNotFit { what: "kernel", path: self.path.clone(), end }
    }

    fn entry(
        &self,
        loaded: &linux_loader::loader::KernelLoaderResult,
        protocol: BootProtocol,
    ) -> Result<Entry, KernelError> {
        let pvh = match loaded.pvh_boot_cap {
            PvhBootCapability::PvhEntryPresent(address) => u32::try_from(address.0).ok(),
            _ => None,
        };
        match (protocol, pvh) {
            (BootProtocol::Auto | BootProtocol::Pvh, Some(address)) => Ok(Entry::Pvh(address)),
            (BootProtocol::Pvh, None) => {
                Err(KernelError::NoEntry { path: self.path.clone(), protocol: "PVH" })
            }
            // A bzImage has its 64-bit entry 512 bytes in; ELF says where it is.
            _ if self.bzimage => Ok(Entry::Linux64(loaded.kernel_load.0 + 0x200)),
            _ => Ok(Entry::Linux64(loaded.kernel_load.0)),
        }
    }
}

/// An initrd file that passed the checks.
#[derive(Debug)]
pub struct InitrdFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl InitrdFile {
    /// Opens an initrd.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        let (file, len) = open("initrd", path)?;
        if len == 0 {
            return Err(KernelError::Empty { what: "initrd", path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), file, len })
    }

    /// Copies the initrd to the top of low RAM, above `kernel_end`. Gives its address and length.
    pub fn load(mut self, memory: &Memory, kernel_end: u64) -> Result<(u64, u64), KernelError> {
        let low = layout::ram_regions(crate::memory::size(memory));
        let top = low.first().map_or(0, |&(_, len)| len);
        let needed = kernel_end.saturating_add(self.len);
        let start = top.saturating_sub(self.len) & !0xfff;
        if start < kernel_end {
            let end = needed;
            return Err(KernelError::DoesNotFit { what: "initrd", path: self.path, end });
        }
        let len = self.len as usize;
        memory.read_exact_volatile_from(GuestAddress(start), &mut self.file, len).map_err(
            |error| KernelError::Read {
                what: "initrd",
                path: self.path,
                source: io::Error::other(error),
            },
        )?;
        Ok((start, self.len))
    }
}
