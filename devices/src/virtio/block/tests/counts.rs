//! What a disk counts.

use super::*;
use crate::metrics::Meter;

fn counted(meter: &Meter) -> Vec<(&'static str, u64)> {
    let metrics = meter.metrics().into_iter();
    metrics.map(|metric| (metric.name, metric.value)).filter(|(_, value)| *value > 0).collect()
}

#[test]
fn requests_are_counted_by_kind_and_with_their_bytes() {
    for engine in host::engines() {
        let executor = Executor::spawn("block").unwrap();
        let file = image();
        let device = with_engine(executor.handle(), engine, &file, config(false));
        let meter = device.meter().unwrap();
        let mut driver = GuestDriver::new(device);
        driver.initialize();
        let range = |sector: u64, sectors: u32| {
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
        };
        for _ in 0..2 {
            assert_eq!(request(&mut driver, kind::IN, 0, &[], 1024).0, OK);
        }
        assert_eq!(request(&mut driver, kind::OUT, 0, &[1; 512], 0).0, OK);
        assert_eq!(request(&mut driver, kind::FLUSH, 0, &[], 0).0, OK);
        assert_eq!(request(&mut driver, kind::DISCARD, 0, &range(0, 8), 0).0, OK);
        assert_eq!(request(&mut driver, kind::WRITE_ZEROES, 0, &range(8, 8), 0).0, OK);
        // Beyond the end, of an unknown kind.
        assert_eq!(request(&mut driver, kind::IN, SECTORS, &[], 512).0, IO_ERROR);
        assert_eq!(request(&mut driver, 77, 0, &[], 512).0, UNSUPPORTED);
        file.as_file().set_len(512).unwrap();
        assert_eq!(request(&mut driver, kind::IN, 8, &[], 512).0, IO_ERROR);
        let expected = [
            ("block_reads_total", 2),
            ("block_read_bytes_total", 2048),
            ("block_writes_total", 1),
            ("block_written_bytes_total", 512),
            ("block_flushes_total", 1),
            ("block_discards_total", 1),
            ("block_zeroes_total", 1),
            ("block_errors_total", 1),
            ("block_refused_total", 2),
        ];
        assert_eq!(counted(&meter), expected);
    }
}
