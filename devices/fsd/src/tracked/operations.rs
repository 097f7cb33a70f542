//! What a guest can ask, each translated and passed on.
//!
//! Left out are what the library does not have either: locks, which stay in the guest's kernel, and
//! ioctl, bmap, poll and tmpfile.

use std::ffi::CStr;
use std::io;
use std::time::Duration;

use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse;
use virtiofsd::read_dir::ReadDir;

use super::lend::Shown;
use super::{Core, Inside, Tracked, errno, held, legal};
use crate::table::Handle;

/// More bytes than any message moves.
const MOST_AT_ONCE: i64 = 1 << 32;

/// The library's numbers of a node and a handle on it.
fn opened(inside: &Inside, node: u64, handle: u64) -> io::Result<(u64, u64)> {
    let known = inside.table.handle(handle).filter(|known| known.node == node);
    let known = known.ok_or_else(|| errno(libc::EBADF))?;
    let inner = held(&inside.table, node)?;
    Ok((inner, known.inner.ok_or_else(|| errno(libc::ESTALE))?))
}

/// A device node of the guest's would be one on the host, for whoever can reach the share there. The
/// white-out of an overlay, 0:0, is none.
fn is_device(mode: u32, rdev: u32) -> bool {
    match mode & libc::S_IFMT {
        libc::S_IFBLK => true,
        libc::S_IFCHR => rdev != 0,
        _ => false,
    }
}

/// The library refuses an id that the map does not have without a number for the guest.
fn numbered(error: io::Error) -> io::Error {
    match (error.raw_os_error(), error.kind()) {
        (None, io::ErrorKind::PermissionDenied) => errno(libc::EPERM),
        _ => error,
    }
}

impl<F: Core> Tracked<F> {
    /// Makes something in a directory with `make`, which gets the library's number of that.
    fn made(
        &self,
        parent: u64,
        name: &CStr,
        make: impl FnOnce(u64) -> io::Result<Entry>,
    ) -> io::Result<Entry> {
        legal(name)?;
        let mut inside = self.inside();
        let entry = make(self.hold(&mut inside, parent)?).map_err(numbered)?;
        self.adopt(&mut inside, parent, name, entry)
    }

    fn removed(
        &self,
        parent: u64,
        name: &CStr,
        remove: impl FnOnce(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let bytes = legal(name)?;
        let mut inside = self.inside();
        remove(self.hold(&mut inside, parent)?)?;
        let released = inside.table.unname(parent, bytes);
        self.let_go(&mut inside, released);
        Ok(())
    }

    /// The library's numbers for a read or a write from `offset` on, and whether the file is to be lent.
    fn used(&self, node: u64, handle: u64, offset: u64) -> io::Result<(u64, u64, bool)> {
        // The kernel's offsets have a sign, and the library panics over others.
        let end = i64::try_from(offset).ok().and_then(|at| at.checked_add(MOST_AT_ONCE));
        end.ok_or_else(|| errno(libc::EINVAL))?;
        let mut inside = self.inside();
        let (inner, known) = opened(&inside, node, handle)?;
        Ok((inner, known, inside.is_due(node, handle)))
    }

    fn closed(&self, node: u64, handle: u64, directory: bool) -> io::Result<()> {
        let mut inside = self.inside();
        if let Some(lender) = &mut inside.lender {
            lender.forget(handle);
        }
        let inner = held(&inside.table, node);
        let known = inside.table.handle(handle).is_some_and(|known| known.directory == directory);
        let closed = if known { inside.table.close(handle, node) } else { None };
        let (closed, released) = closed.ok_or_else(|| errno(libc::EBADF))?;
        if let (Ok(inner), Some(handle)) = (inner, closed.inner) {
            self.close(inner, handle);
        }
        self.let_go(&mut inside, released);
        Ok(())
    }

    fn open_as(
        &self,
        node: u64,
        flags: u32,
        directory: bool,
        open: impl FnOnce(u64) -> io::Result<(Option<u64>, OpenOptions)>,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        let mut inside = self.inside();
        let inner = self.hold(&mut inside, node)?;
        match inside.table.node(node).is_some_and(|node| node.kind == libc::S_IFDIR) {
            true if !directory => return Err(errno(libc::EISDIR)),
            false if directory => return Err(errno(libc::ENOTDIR)),
            _ => {}
        }
        let (inner, options) = open(inner)?;
        let handle = Handle { node, inner, directory, flags };
        Ok((Some(inside.table.open(handle)), options))
    }
}

impl<F: Core> FileSystem for Tracked<F> {
    type Inode = u64;
    type Handle = u64;
    type DirIter = ReadDir<Vec<u8>>;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        let mut inside = self.inside();
        self.clear(&mut inside);
        // The library prints a line for each guest that lacks that one; such a guest ignores what it
        // is told of submounts.
        let options = self.core().init(capable | FsOptions::SUBMOUNTS)?;
        self.begin(&mut inside)?;
        Ok(options)
    }

    fn destroy(&self) {
        self.clear(&mut self.inside());
        self.core().destroy();
    }

    fn lookup(&self, ctx: Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        let bytes = legal(name)?;
        let mut inside = self.inside();
        let inner = self.hold(&mut inside, parent)?;
        match self.core().lookup(ctx, inner, name) {
            Ok(entry) => self.adopt(&mut inside, parent, name, entry),
            Err(error) => {
                if error.raw_os_error() == Some(libc::ENOENT) {
                    // Gone on the host, unseen.
                    let released = inside.table.unname(parent, bytes);
                    self.let_go(&mut inside, released);
                }
                Err(error)
            }
        }
    }

    fn forget(&self, _ctx: Context, inode: u64, count: u64) {
        let mut inside = self.inside();
        let released = inside.table.forget(inode, count);
        self.let_go(&mut inside, released);
    }

    fn getattr(
        &self,
        ctx: Context,
        inode: u64,
        _handle: Option<u64>,
    ) -> io::Result<(fuse::Attr, Duration)> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().getattr(ctx, inner, None)
    }

    fn setattr(
        &self,
        ctx: Context,
        inode: u64,
        attr: fuse::SetattrIn,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(fuse::Attr, Duration)> {
        let (inner, handle) = {
            let mut inside = self.inside();
            match handle {
                Some(handle) => {
                    let (inner, handle) = opened(&inside, inode, handle)?;
                    (inner, Some(handle))
                }
                None => (self.hold(&mut inside, inode)?, None),
            }
        };
        self.core().setattr(ctx, inner, attr, handle, valid).map_err(numbered)
    }

    fn readlink(&self, ctx: Context, inode: u64) -> io::Result<Vec<u8>> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().readlink(ctx, inner)
    }

    fn symlink(
        &self,
        ctx: Context,
        linkname: &CStr,
        parent: u64,
        name: &CStr,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let core = self.core();
        self.made(parent, name, |inner| core.symlink(ctx, linkname, inner, name, extensions))
    }

    fn mknod(
        &self,
        ctx: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        rdev: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        if is_device(mode, rdev) {
            return Err(errno(libc::EPERM));
        }
        let core = self.core();
        self.made(parent, name, |inner| core.mknod(ctx, inner, name, mode, rdev, umask, extensions))
    }

    fn mkdir(
        &self,
        ctx: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let core = self.core();
        self.made(parent, name, |inner| core.mkdir(ctx, inner, name, mode, umask, extensions))
    }

    fn unlink(&self, ctx: Context, parent: u64, name: &CStr) -> io::Result<()> {
        self.removed(parent, name, |inner| self.core().unlink(ctx, inner, name))
    }

    fn rmdir(&self, ctx: Context, parent: u64, name: &CStr) -> io::Result<()> {
        self.removed(parent, name, |inner| self.core().rmdir(ctx, inner, name))
    }

    fn rename(
        &self,
        ctx: Context,
        olddir: u64,
        oldname: &CStr,
        newdir: u64,
        newname: &CStr,
        flags: u32,
    ) -> io::Result<()> {
        let (from, to) = (legal(oldname)?, legal(newname)?);
        let mut inside = self.inside();
        let old = self.hold(&mut inside, olddir)?;
        let new = self.hold(&mut inside, newdir)?;
        self.core().rename(ctx, old, oldname, new, newname, flags)?;
        let exchange = flags & libc::RENAME_EXCHANGE != 0;
        let released = inside.table.rename((olddir, from), (newdir, to), exchange);
        self.let_go(&mut inside, released);
        Ok(())
    }

    fn link(&self, ctx: Context, inode: u64, parent: u64, name: &CStr) -> io::Result<Entry> {
        let core = self.core();
        let linked = self.hold(&mut self.inside(), inode)?;
        self.made(parent, name, |inner| core.link(ctx, linked, inner, name))
    }

    fn open(
        &self,
        ctx: Context,
        inode: u64,
        kill_priv: bool,
        flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        self.open_as(inode, flags, false, |inner| self.core().open(ctx, inner, kill_priv, flags))
    }

    fn create(
        &self,
        ctx: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        kill_priv: bool,
        flags: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions)> {
        legal(name)?;
        let mut inside = self.inside();
        let inner = self.hold(&mut inside, parent)?;
        let core = self.core();
        let made = core.create(ctx, inner, name, mode, kill_priv, flags, umask, extensions);
        let (entry, handle, options) = made.map_err(numbered)?;
        let entry = self.adopt(&mut inside, parent, name, entry)?;
        let handle = Handle { node: entry.inode, inner: handle, directory: false, flags };
        let handle = inside.table.open(handle);
        Ok((entry, Some(handle), options))
    }

    fn read<W: ZeroCopyWriter>(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        w: W,
        size: u32,
        offset: u64,
        lock_owner: Option<u64>,
        flags: u32,
    ) -> io::Result<usize> {
        let (inner, opened, due) = self.used(inode, handle, offset)?;
        let w = Shown(w, due.then_some(|file: &_| self.lend(inode, handle, file)));
        self.core().read(ctx, inner, opened, w, size, offset, lock_owner, flags)
    }

    fn write<R: ZeroCopyReader>(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        r: R,
        size: u32,
        offset: u64,
        lock_owner: Option<u64>,
        delayed_write: bool,
        kill_priv: bool,
        flags: u32,
    ) -> io::Result<usize> {
        let (inner, opened, due) = self.used(inode, handle, offset)?;
        let r = Shown(r, due.then_some(|file: &_| self.lend(inode, handle, file)));
        let core = self.core();
        core.write(ctx, inner, opened, r, size, offset, lock_owner, delayed_write, kill_priv, flags)
    }

    fn flush(&self, ctx: Context, inode: u64, handle: u64, lock_owner: u64) -> io::Result<()> {
        let inside = self.inside();
        match opened(&inside, inode, handle) {
            Ok((inner, handle)) => self.core().flush(ctx, inner, handle, lock_owner),
            // A tombstone is closed without complaint: there is nothing to be lost.
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn fsync(&self, ctx: Context, inode: u64, datasync: bool, handle: u64) -> io::Result<()> {
        let (inner, handle) = opened(&self.inside(), inode, handle)?;
        self.core().fsync(ctx, inner, datasync, handle)
    }

    fn fallocate(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        let (inner, handle) = opened(&self.inside(), inode, handle)?;
        self.core().fallocate(ctx, inner, handle, mode, offset, length)
    }

    fn release(
        &self,
        _ctx: Context,
        inode: u64,
        _flags: u32,
        handle: u64,
        _flush: bool,
        _flock_release: bool,
        _lock_owner: Option<u64>,
    ) -> io::Result<()> {
        self.closed(inode, handle, false)
    }

    fn statfs(&self, ctx: Context, inode: u64) -> io::Result<libc::statvfs64> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().statfs(ctx, inner)
    }

    fn setxattr(
        &self,
        ctx: Context,
        inode: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
        extra_flags: SetxattrFlags,
    ) -> io::Result<()> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().setxattr(ctx, inner, name, value, flags, extra_flags)
    }

    fn getxattr(
        &self,
        ctx: Context,
        inode: u64,
        name: &CStr,
        size: u32,
    ) -> io::Result<GetxattrReply> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().getxattr(ctx, inner, name, size)
    }

    fn listxattr(&self, ctx: Context, inode: u64, size: u32) -> io::Result<ListxattrReply> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().listxattr(ctx, inner, size)
    }

    fn removexattr(&self, ctx: Context, inode: u64, name: &CStr) -> io::Result<()> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().removexattr(ctx, inner, name)
    }

    fn opendir(
        &self,
        ctx: Context,
        inode: u64,
        flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        self.open_as(inode, flags, true, |inner| self.core().opendir(ctx, inner, flags))
    }

    fn readdir(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        size: u32,
        offset: u64,
    ) -> io::Result<ReadDir<Vec<u8>>> {
        let (inner, handle) = opened(&self.inside(), inode, handle)?;
        self.core().readdir(ctx, inner, handle, size, offset)
    }

    fn fsyncdir(&self, ctx: Context, inode: u64, datasync: bool, handle: u64) -> io::Result<()> {
        let (inner, handle) = opened(&self.inside(), inode, handle)?;
        self.core().fsyncdir(ctx, inner, datasync, handle)
    }

    fn releasedir(&self, _ctx: Context, inode: u64, _flags: u32, handle: u64) -> io::Result<()> {
        self.closed(inode, handle, true)
    }

    fn access(&self, ctx: Context, inode: u64, mask: u32) -> io::Result<()> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().access(ctx, inner, mask)
    }

    fn lseek(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        offset: u64,
        whence: u32,
    ) -> io::Result<u64> {
        let (inner, handle) = opened(&self.inside(), inode, handle)?;
        self.core().lseek(ctx, inner, handle, offset, whence)
    }

    fn copyfilerange(
        &self,
        ctx: Context,
        inode_in: u64,
        handle_in: u64,
        offset_in: u64,
        inode_out: u64,
        handle_out: u64,
        offset_out: u64,
        len: u64,
        flags: u64,
    ) -> io::Result<usize> {
        let (from, to) = {
            let inside = self.inside();
            (opened(&inside, inode_in, handle_in)?, opened(&inside, inode_out, handle_out)?)
        };
        self.core()
            .copyfilerange(ctx, from.0, from.1, offset_in, to.0, to.1, offset_out, len, flags)
    }

    fn syncfs(&self, ctx: Context, inode: u64) -> io::Result<()> {
        let inner = self.hold(&mut self.inside(), inode)?;
        self.core().syncfs(ctx, inner)
    }
}
