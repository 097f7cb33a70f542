//! CRC-64/XZ: finds damage. It is no proof against forgery, for which nothing here relies on it.

/// The polynomial of ECMA-182, bits reversed.
const POLYNOMIAL: u64 = 0xc96c_5795_d787_0f42;

static TABLE: [u64; 256] = table();

const fn table() -> [u64; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ POLYNOMIAL } else { value >> 1 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
}

/// The checksum of `bytes`, as it stands in a description: 16 hexadecimal digits.
pub fn of(bytes: &[u8]) -> String {
    format!("{:016x}", crc64(bytes))
}

fn crc64(bytes: &[u8]) -> u64 {
    let step = |crc: u64, &byte: &u8| {
        let index = (crc as u8 ^ byte) as usize;
        // In range: a byte.
        crc >> 8 ^ TABLE.get(index).copied().unwrap_or(0)
    };
    !bytes.iter().fold(!0, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of the catalogue of parametrised CRC algorithms.
    #[test]
    fn the_check_value_is_right() {
        assert_eq!(of(b"123456789"), "995dc9bbdf1939fa");
        assert_eq!(of(b""), "0000000000000000");
    }
}
