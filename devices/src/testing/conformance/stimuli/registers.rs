//! Status, features, queue set-up and notifications, in every state of the device.

use super::{Expect, Row, Stage};
use crate::bus::AccessError;
use crate::testing::driver::{GuestDriver, Kind, register};
use crate::testing::{HIGH_RAM, HOLE, RAM_SIZE};
use crate::virtio::lifecycle::status;
use crate::virtio::mmio::QUEUE_NOTIFY;

const END: u64 = HIGH_RAM.0 + RAM_SIZE;

type Done = Result<(), AccessError>;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    // Fresh
    ("H-24", "DRIVER_OK first of all", Stage::Fresh, Expect::Refused,
     |d| d.write(register::STATUS, 4)),
    ("H-24", "all bits at once", Stage::Fresh, Expect::Refused, |d| d.write(register::STATUS, 15)),
    ("H-24", "FEATURES_OK first of all", Stage::Fresh, Expect::Nothing,
     |d| d.write(register::STATUS, 8)),
    ("H-24", "reserved bits", Stage::Fresh, Expect::Nothing, |d| d.write(register::STATUS, 0x30)),
    ("H-24", "a status wider than a byte", Stage::Fresh, Expect::Refused,
     |d| d.write(register::STATUS, 0x100)),
    ("own", "the device's own wish to be reset", Stage::Fresh, Expect::Nothing,
     |d| d.write(register::STATUS, 0x40)),
    ("own", "giving up before it begins", Stage::Fresh, Expect::Status(0x80),
     |d| d.write(register::STATUS, 0x80)),
    ("own", "giving up and all else at once", Stage::Fresh, Expect::Refused,
     |d| d.write(register::STATUS, 0xff)),
    ("own", "features before a driver", Stage::Fresh, Expect::Refused,
     |d| d.write(register::DRIVER_FEATURES, 1)),
    ("own", "a queue ready before a driver", Stage::Fresh, Expect::Refused,
     |d| d.write(register::QUEUE_READY, 1)),
    ("own", "the queue size before a driver", Stage::Fresh, Expect::Refused,
     |d| d.write(register::QUEUE_SIZE, 1)),
    ("own", "a descriptor address before a driver", Stage::Fresh, Expect::Refused,
     |d| d.write(register::QUEUE_DESC, 0x5000)),
    ("own", "an available address before a driver", Stage::Fresh, Expect::Refused,
     |d| d.write(register::QUEUE_AVAIL, 0x5000)),
    ("own", "a used address before a driver", Stage::Fresh, Expect::Refused,
     |d| d.write(register::QUEUE_USED, 0x5000)),
    ("own", "a feature page that does not exist", Stage::Fresh, Expect::Nothing,
     |d| d.write(register::DEVICE_FEATURES_SELECT, u32::MAX)),
    ("own", "a driver's feature page that does not exist", Stage::Fresh, Expect::Nothing,
     |d| d.write(register::DRIVER_FEATURES_SELECT, u32::MAX)),
    ("own", "acknowledged interrupts that never were", Stage::Fresh, Expect::Nothing,
     |d| d.write(register::INTERRUPT_ACK, u32::MAX)),
    ("H-14", "a notification before everything", Stage::Fresh, Expect::Nothing, |d| notify_all(d)),
    ("H-14", "the doorbells before everything", Stage::Fresh, Expect::Nothing, |d| kick_all(d)),
    ("own", "a thousand resets of nothing", Stage::Fresh, Expect::Nothing,
     |d| (0..1000).try_for_each(|_| d.write(register::STATUS, 0))),
    ("own", "configuration written before a driver", Stage::Fresh, Expect::Refused,
     |d| d.write_config(0, &[0xff])),
    ("own", "configuration read far beyond its end", Stage::Fresh, Expect::Refused,
     |d| d.read_config(0xf00, &mut [0; 4])),
    ("own", "configuration written far beyond its end", Stage::Fresh, Expect::Refused,
     |d| d.write_config(0xf00, &[0; 4])),
    // Noticed
    ("H-24", "DRIVER_OK of a driver that has said nothing", Stage::Noticed, Expect::Refused,
     |d| d.write(register::STATUS, 5)),
    ("H-24", "ACKNOWLEDGE taken back", Stage::Noticed, Expect::Refused,
     |d| d.write(register::STATUS, 2)),
    ("own", "FEATURES_OK without DRIVER", Stage::Noticed, Expect::Nothing,
     |d| d.write(register::STATUS, 9)),
    ("own", "features without DRIVER", Stage::Noticed, Expect::Refused,
     |d| d.write(register::DRIVER_FEATURES, 1)),
    ("own", "a queue ready without DRIVER", Stage::Noticed, Expect::Refused,
     |d| d.write(register::QUEUE_READY, 1)),
    ("H-24", "FEATURES_OK without VERSION_1", Stage::Noticed, Expect::Status(3),
     |d| d.write(register::STATUS, 3).and_then(|()| d.write(register::STATUS, 11))),
    ("own", "FEATURES_OK with a feature that nobody offers", Stage::Noticed, Expect::Status(3),
     |d| all_features(d)),
    ("own", "DRIVER and FEATURES_OK and DRIVER_OK at once", Stage::Noticed, Expect::Refused,
     |d| d.write(register::STATUS, 15)),
    // Agreed
    ("H-24", "features after FEATURES_OK", Stage::Agreed, Expect::Refused,
     |d| d.write(register::DRIVER_FEATURES, 0)),
    ("H-24", "FEATURES_OK taken back", Stage::Agreed, Expect::Refused,
     |d| d.write(register::STATUS, 3)),
    ("H-24", "DRIVER taken back", Stage::Agreed, Expect::Refused, |d| d.write(register::STATUS, 9)),
    ("H-02", "queue size 0", Stage::Agreed, Expect::Refused, |d| d.write(register::QUEUE_SIZE, 0)),
    ("H-02", "queue size 3", Stage::Agreed, Expect::Refused, |d| d.write(register::QUEUE_SIZE, 3)),
    ("H-02", "queue size 32768", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_SIZE, 32768)),
    ("H-02", "queue size 65535", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_SIZE, 65535)),
    ("H-02", "queue size 65536", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_SIZE, 65536)),
    ("H-02", "queue size 65537, which is 1 in 16 bits", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_SIZE, 65537)),
    ("H-02", "twice the largest queue size", Stage::Agreed, Expect::Refused,
     |d| { let size = u32::from(d.queue_size(0)); d.write(register::QUEUE_SIZE, 2 * size) }),
    ("own", "a descriptor address off by eight", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_DESC, 0x5008)),
    ("own", "a descriptor address off by one", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_DESC, 0x5001)),
    ("own", "an available address off by one", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_AVAIL, 0x5001)),
    ("own", "a used address off by two", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_USED, 0x5002)),
    ("own", "a used address of all ones", Stage::Agreed, Expect::Refused,
     |d| d.write(register::QUEUE_USED, u32::MAX)),
    ("H-20", "the size of a queue that does not exist", Stage::Agreed, Expect::Refused,
     |d| missing_queue(d, register::QUEUE_SIZE)),
    ("H-20", "a queue ready that does not exist", Stage::Agreed, Expect::Refused,
     |d| missing_queue(d, register::QUEUE_READY)),
    ("H-20", "a descriptor address of a queue that does not exist", Stage::Agreed, Expect::Refused,
     |d| missing_queue(d, register::QUEUE_DESC)),
    ("H-20", "an available address of a queue that does not exist", Stage::Agreed, Expect::Refused,
     |d| missing_queue(d, register::QUEUE_AVAIL)),
    ("H-20", "a used address of a queue that does not exist", Stage::Agreed, Expect::Refused,
     |d| missing_queue(d, register::QUEUE_USED)),
    ("H-22", "a queue ready whose rings were never set", Stage::Agreed, Expect::Alive,
     |d| d.write(register::QUEUE_READY, 1).and_then(|()| go(d))),
    ("H-22", "a queue ready and not ready a thousand times", Stage::Agreed, Expect::Alive,
     |d| toggle(d)),
    ("H-22", "rings of all ones", Stage::Agreed, Expect::Reset,
     |d| rings_at(d, [!0xf, !0xf, !0xf])),
    ("own", "rings whose end wraps around", Stage::Agreed, Expect::Reset,
     |d| rings_at(d, [!0xff, 0x1000, 0x2000])),
    ("own", "three rings at one place", Stage::Agreed, Expect::Alive,
     |d| rings_at(d, [0x10_0000; 3])),
    ("own", "rings that overlap", Stage::Agreed, Expect::Alive,
     |d| rings_at(d, [0x10_0000, 0x10_0010, 0x10_0020])),
    ("own", "rings at the very end of RAM", Stage::Agreed, Expect::Reset,
     |d| rings_at(d, [END - 16, END - 2, END - 4])),
    ("own", "a descriptor table over the hole", Stage::Agreed, Expect::Reset,
     |d| rings_at(d, [HOLE.0 - 16, 0x10_0000, 0x11_0000])),
    ("own", "a used ring in the hole", Stage::Agreed, Expect::Reset,
     |d| rings_at(d, [0x10_0000, 0x11_0000, HOLE.0])),
    ("own", "an available ring beyond RAM", Stage::Agreed, Expect::Reset,
     |d| rings_at(d, [0x10_0000, END, 0x11_0000])),
    ("own", "DRIVER_OK without any queue", Stage::Agreed, Expect::Alive, |d| go(d)),
    ("own", "DRIVER_OK with the last queue only", Stage::Agreed, Expect::Alive,
     |d| last_queue_only(d)),
    ("own", "a queue of one entry", Stage::Agreed, Expect::Alive,
     |d| d.write(register::QUEUE_SIZE, 1).and_then(|()| rings_at(d, [0x10_0000, 0x11_0000, 0x12_0000]))),
    ("H-14", "a notification before DRIVER_OK", Stage::Agreed, Expect::Nothing, |d| notify_all(d)),
    // Ready
    ("H-21", "the queue size of a queue that is ready", Stage::Ready, Expect::Refused,
     |d| d.write(register::QUEUE_SIZE, 1)),
    ("H-21", "a descriptor address of a queue that is ready", Stage::Ready, Expect::Refused,
     |d| d.write(register::QUEUE_DESC, 0x5000)),
    ("H-21", "an available address of a queue that is ready", Stage::Ready, Expect::Refused,
     |d| d.write(register::QUEUE_AVAIL, 0x5000)),
    ("H-21", "a used address of a queue that is ready", Stage::Ready, Expect::Refused,
     |d| d.write(register::QUEUE_USED, 0x5000)),
    ("H-21", "the upper half of a descriptor address of a queue that is ready", Stage::Ready, Expect::Refused,
     |d| d.write(register::QUEUE_DESC + 4, 1)),
    ("H-21", "the upper half of an available address of a queue that is ready", Stage::Ready, Expect::Refused,
     |d| d.write(register::QUEUE_AVAIL + 4, 1)),
    ("H-21", "the upper half of a used address of a queue that is ready", Stage::Ready, Expect::Refused,
     |d| d.write(register::QUEUE_USED + 4, 1)),
    ("H-14", "a notification of queues that are ready before DRIVER_OK", Stage::Ready, Expect::Nothing,
     |d| notify_all(d)),
    ("H-14", "the doorbells of queues that are ready before DRIVER_OK", Stage::Ready, Expect::Nothing,
     |d| kick_all(d)),
    ("own", "giving up at the last moment", Stage::Ready, Expect::Status(0x8b),
     |d| d.write(register::STATUS, 0x8b)),
    ("own", "DRIVER_OK and giving up at once", Stage::Ready, Expect::Status(0x8b),
     |d| d.write(register::STATUS, 0x8f)),
    // Live
    ("H-21", "the queue size of a live queue", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_SIZE, 1)),
    ("H-21", "a descriptor address of a live queue", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_DESC, 0x5000)),
    ("H-21", "an available address of a live queue", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_AVAIL, 0x5000)),
    ("H-21", "a used address of a live queue", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_USED, 0x5000)),
    ("H-21", "the upper half of a descriptor address of a live queue", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_DESC + 4, 1)),
    ("H-21", "the upper half of an available address of a live queue", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_AVAIL + 4, 1)),
    ("H-21", "the upper half of a used address of a live queue", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_USED + 4, 1)),
    ("H-21", "a live queue made not ready", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_READY, 0)),
    ("H-21", "a live queue made ready again", Stage::Live, Expect::Refused,
     |d| d.write(register::QUEUE_READY, 1)),
    ("H-24", "features of a live device", Stage::Live, Expect::Refused,
     |d| d.write(register::DRIVER_FEATURES, 0)),
    ("H-24", "ACKNOWLEDGE taken back while live", Stage::Live, Expect::Refused,
     |d| d.write(register::STATUS, 14)),
    ("H-24", "DRIVER taken back while live", Stage::Live, Expect::Refused,
     |d| d.write(register::STATUS, 13)),
    ("H-24", "DRIVER_OK taken back while live", Stage::Live, Expect::Refused,
     |d| d.write(register::STATUS, 11)),
    ("H-24", "FEATURES_OK taken back while live", Stage::Live, Expect::Refused,
     |d| d.write(register::STATUS, 7)),
    ("own", "DRIVER_OK again", Stage::Live, Expect::Nothing, |d| d.write(register::STATUS, 15)),
    ("own", "the device's own wish to be reset while live", Stage::Live, Expect::Nothing,
     |d| d.write(register::STATUS, 0x4f)),
    ("own", "reserved bits while live", Stage::Live, Expect::Nothing,
     |d| d.write(register::STATUS, 0x3f)),
    ("own", "giving up while live", Stage::Live, Expect::Status(0x8f),
     |d| d.write(register::STATUS, 0x8f)),
    ("H-15", "ten thousand notifications of nothing", Stage::Live, Expect::Nothing,
     |d| (0..10_000).try_for_each(|_| d.write(QUEUE_NOTIFY, 0))),
    ("H-14", "notifications of queues that do not exist", Stage::Live, Expect::Nothing,
     |d| [64, 0x1000, 0xffff, u32::MAX].into_iter().try_for_each(|queue| d.write(QUEUE_NOTIFY, queue))),
    ("own", "acknowledged interrupts that never were, while live", Stage::Live, Expect::Nothing,
     |d| d.write(register::INTERRUPT_ACK, u32::MAX)),
    ("own", "selectors of all ones", Stage::Live, Expect::Nothing, |d| selectors(d)),
    ("own", "the configuration space full of ones", Stage::Live, Expect::Alive,
     |d| fill_config(d, 0xff)),
    ("own", "the configuration space full of zeroes", Stage::Live, Expect::Alive,
     |d| fill_config(d, 0)),
    ("own", "configuration over its end", Stage::Live, Expect::Refused, |d| over_config(d)),
    ("own", "a reset while live, and at once again", Stage::Live, Expect::Status(0),
     |d| d.write(register::STATUS, 0).and_then(|()| d.write(register::STATUS, 0))),
    // Broken
    ("own", "DRIVER_OK again of a device that wants a reset", Stage::Broken, Expect::Nothing,
     |d| d.write(register::STATUS, 15)),
    ("own", "its wish acknowledged", Stage::Broken, Expect::Nothing,
     |d| d.write(register::STATUS, 0x4f)),
    ("own", "notifications of a device that wants a reset", Stage::Broken, Expect::Nothing,
     |d| notify_all(d)),
    ("own", "a queue of a device that wants a reset", Stage::Broken, Expect::Refused,
     |d| d.write(register::QUEUE_READY, 0)),
    ("own", "features of a device that wants a reset", Stage::Broken, Expect::Refused,
     |d| d.write(register::DRIVER_FEATURES, 0)),
    // Failed
    ("own", "DRIVER_OK after giving up", Stage::Failed, Expect::Refused,
     |d| d.write(register::STATUS, 0x8f)),
    ("own", "giving up taken back", Stage::Failed, Expect::Refused,
     |d| d.write(register::STATUS, 15)),
    ("own", "notifications after giving up", Stage::Failed, Expect::Nothing, |d| notify_all(d)),
    ("own", "a queue after giving up", Stage::Failed, Expect::Refused,
     |d| d.write(register::QUEUE_READY, 0)),
    // Again
    ("H-14", "a notification after a reset", Stage::Again, Expect::Nothing, |d| notify_all(d)),
    ("H-14", "the doorbells after a reset", Stage::Again, Expect::Nothing, |d| kick_all(d)),
    ("own", "DRIVER_OK after a reset", Stage::Again, Expect::Refused,
     |d| d.write(register::STATUS, 15)),
    ("own", "a queue ready after a reset", Stage::Again, Expect::Refused,
     |d| d.write(register::QUEUE_READY, 1)),
    ("own", "features after a reset", Stage::Again, Expect::Refused,
     |d| d.write(register::DRIVER_FEATURES, 1)),
];

fn notify_all(driver: &mut GuestDriver) -> Done {
    let count = u32::from(driver.queue_count());
    (0..count + 2).try_for_each(|queue| driver.write(QUEUE_NOTIFY, queue))
}

fn kick_all(driver: &mut GuestDriver) -> Done {
    (0..driver.queue_count()).for_each(|queue| driver.kick(queue));
    Ok(())
}

fn missing_queue(driver: &mut GuestDriver, register: u64) -> Done {
    let count = driver.queue_count();
    driver.write(register::QUEUE_SELECT, count.into()).unwrap();
    assert_eq!((driver.read(register::QUEUE_SIZE_MAX), driver.read(register::QUEUE_READY)), (0, 0));
    let low = driver.write(register, 1);
    driver.write(register::QUEUE_SELECT, 0xffff).unwrap();
    driver.write(register, 0x1000).and(low)
}

/// DRIVER and whatever features there can be.
fn all_features(driver: &mut GuestDriver) -> Done {
    driver.write(register::STATUS, 3)?;
    for word in 0..2 {
        driver.write(register::DRIVER_FEATURES_SELECT, word)?;
        driver.write(register::DRIVER_FEATURES, u32::MAX)?;
    }
    driver.write(register::STATUS, 11)
}

fn go(driver: &mut GuestDriver) -> Done {
    let bits = driver.status() | status::DRIVER_OK;
    driver.write(register::STATUS, bits.into())
}

/// Over PCI a queue cannot be made not ready.
fn toggle(driver: &mut GuestDriver) -> Done {
    for _ in 0..1000 {
        driver.write(register::QUEUE_READY, 1)?;
        let off = driver.write(register::QUEUE_READY, 0);
        assert_eq!(off.is_ok(), driver.kind() == Kind::Mmio);
    }
    go(driver)
}

fn rings_at(driver: &mut GuestDriver, rings: [u64; 3]) -> Done {
    driver.set_rings(0, rings)?;
    driver.write(register::QUEUE_READY, 1)?;
    go(driver)
}

fn last_queue_only(driver: &mut GuestDriver) -> Done {
    let last = driver.queue_count() - 1;
    driver.set_rings(last, GuestDriver::ring_addresses(last))?;
    driver.write(register::QUEUE_READY, 1)?;
    go(driver)
}

fn selectors(driver: &mut GuestDriver) -> Done {
    for register in [register::DEVICE_FEATURES_SELECT, register::DRIVER_FEATURES_SELECT] {
        driver.write(register, u32::MAX)?;
    }
    driver.write(register::QUEUE_SELECT, 0xffff)?;
    assert_eq!(driver.read(register::DEVICE_FEATURES), 0);
    assert_eq!(driver.read(register::QUEUE_DESC), 0);
    Ok(())
}

fn fill_config(driver: &mut GuestDriver, byte: u8) -> Done {
    let len = driver.lifecycle(|life| life.identity().config_len);
    for size in [1, 2, 4, 8_usize] {
        for offset in 0..len {
            // Refused where it would go over the end.
            let _ = driver.write_config(offset, &[byte; 8][..size]);
        }
    }
    Ok(())
}

fn over_config(driver: &mut GuestDriver) -> Done {
    let len = driver.lifecycle(|life| life.identity().config_len);
    driver.write_config(len.saturating_sub(1), &[0; 8])
}
