//! Mutations of bytes that tend to find gaps in parsers.

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Largest length of an input in bytes.
const LENGTH_MAX: usize = 1 << 16;
/// Numbers at the edges of a field's range.
const EDGES: [u64; 10] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 24,
    u64::MAX,
];

/// Changes `data` once to a few times, partly with pieces of `other`.
pub fn mutate(data: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
    for _ in 0..1 + rng.below(4) {
        mutate_once(data, other, rng);
    }
    data.truncate(LENGTH_MAX);
}

fn mutate_once(data: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
    if data.is_empty() {
        data.push(rng.next() as u8);
    }
    let at = rng.below(data.len());
    match rng.below(9) {
        0 => data[at] ^= 1 << rng.below(8),
        1 => data[at] = rng.next() as u8,
        2 => data[at] = data[at].wrapping_add(if rng.below(2) == 0 { 1 } else { 255 }),
        3 => data.insert(at, rng.next() as u8),
        4 => {
            data.remove(at);
        }
        5 => data.truncate(at),
        6 => {
            // Copies a piece of the data to another position.
            let end = at + rng.below(data.len() - at) + 1;
            let piece = data[at..end].to_vec();
            let to = rng.below(data.len());
            data.splice(to..to, piece);
        }
        7 if !other.is_empty() => {
            let from = rng.below(other.len());
            data.truncate(at);
            data.extend_from_slice(&other[from..]);
        }
        _ => {
            let bytes = EDGES[rng.below(EDGES.len())].to_be_bytes();
            let width = [1, 2, 4, 8][rng.below(4)];
            let end = (at + width).min(data.len());
            data.splice(at..end, bytes[8 - width..].iter().copied());
        }
    }
}
