//! The requests of vhost-user, as far as this backend knows them.

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures as Protocol,
    VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use vm_memory::{FileOffset, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::{Mapping, Ring, Session, Transfer};
use crate::service::Memory;
use crate::tracked::Core;

/// VIRTIO_F_VERSION_1.
const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_EVENT_IDX.
const EVENT_IDX: u64 = 1 << 29;

impl<F: Core> Session<F> {
    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }
}

fn event(file: Option<File>) -> Option<EventFd> {
    // SAFETY: the descriptor is owned by the file, which gives it away. One that is no eventfd is
    // one that can be neither read nor written as such.
    file.map(|file| unsafe { EventFd::from_raw_fd(file.into_raw_fd()) })
}

/// What needs a feature that was not offered.
fn unasked<T>() -> Result<T> {
    Err(Error::InvalidParam)
}

impl<F: Core> VhostUserBackendReqHandlerMut for Session<F> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        unasked()
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(VERSION_1 | EVENT_IDX | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.get_features()? != 0 {
            return unasked();
        }
        self.by_index = features & EVENT_IDX != 0;
        Ok(())
    }

    fn set_mem_table(&mut self, regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<()> {
        let (mut ranges, mut mappings) = (Vec::new(), Vec::new());
        for (region, file) in regions.iter().zip(files) {
            let (user, guest, len) = (region.user_addr, region.guest_phys_addr, region.memory_size);
            mappings.push(Mapping { user, guest, len });
            let len = usize::try_from(len).map_err(|_| Error::InvalidParam)?;
            let file = FileOffset::new(file, region.mmap_offset);
            ranges.push((GuestAddress(guest), len, Some(file)));
        }
        let memory = Memory::from_ranges_with_files(ranges).map_err(|_| Error::InvalidParam)?;
        (self.memory, self.mappings) = (Some(memory), mappings);
        Ok(())
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.ring(index)?.size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.ring(index)?.addresses = [descriptor, available, used];
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.ring(index)?.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let ring = self.ring(index)?;
        if let Some(queue) = ring.queue.take() {
            ring.base = virtio_queue::QueueT::next_avail(&queue);
        }
        ring.kick = None;
        Ok(VhostUserVringState::new(index, u32::from(ring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into())?.kick = event(fd);
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into())?.call = event(fd);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, _fd: Option<File>) -> Result<()> {
        self.ring(index.into()).map(|_| ())
    }

    fn get_protocol_features(&mut self) -> Result<Protocol> {
        Ok(Protocol::MQ | Protocol::REPLY_ACK | Protocol::DEVICE_STATE)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index)?.enabled = enable;
        if !enable {
            return Ok(());
        }
        self.set_up().ok_or(Error::InvalidParam)
    }

    fn get_config(&mut self, _: u32, _: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        unasked()
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        unasked()
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unasked()
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unasked()
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        unasked()
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        unasked()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        unasked()
    }

    fn add_mem_region(&mut self, _: &VhostUserSingleMemoryRegion, _: File) -> Result<()> {
        unasked()
    }

    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        unasked()
    }

    fn set_device_state_fd(
        &mut self,
        direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        fd: File,
    ) -> Result<Option<File>> {
        self.transferred = false;
        self.transfer = Some(Transfer { direction, pipe: fd });
        Ok(None)
    }

    fn check_device_state(&mut self) -> Result<()> {
        if self.transferred { Ok(()) } else { Err(Error::BackendInternalError) }
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unasked()
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        unasked()
    }
}
