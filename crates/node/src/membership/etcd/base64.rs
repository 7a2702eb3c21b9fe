//! Base64 (RFC 4648, section 4), in which etcd's JSON gateway has keys and values.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Returns the text of bytes, padded.
pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |position: usize| u32::from(group.get(position).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for position in 0..4 {
            let index = (bits >> (18 - 6 * position)) & 0x3f;
            match position <= group.len() {
                true => text.push(char::from(ALPHABET[index as usize])),
                false => text.push('='),
            }
        }
    }
    text
}

/// Returns the bytes of a padded text; none if the text is not one that [`encode`] makes.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (groups, rest) = text.as_bytes().as_chunks::<4>();
    if !rest.is_empty() {
        return None;
    }
    for (position, group) in groups.iter().enumerate() {
        let padding = group.iter().rev().take_while(|byte| **byte == b'=').count();
        let is_last = position + 1 == groups.len();
        if padding > 2 || padding > 0 && !is_last {
            return None;
        }
        let mut bits = 0;
        for letter in &group[..4 - padding] {
            bits = bits << 6 | value_of(*letter)?;
        }
        bits <<= 6 * padding;
        let [_, high, middle, low] = bits.to_be_bytes();
        let unused = &[high, middle, low][3 - padding..];
        if unused.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(&[high, middle, low][..3 - padding]);
    }
    Some(bytes)
}

fn value_of(letter: u8) -> Option<u32> {
    let value = match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(u32::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4648, section 10.
    const VECTORS: [(&str, &str); 7] = [
        ("", ""),
        ("f", "Zg=="),
        ("fo", "Zm8="),
        ("foo", "Zm9v"),
        ("foob", "Zm9vYg=="),
        ("fooba", "Zm9vYmE="),
        ("foobar", "Zm9vYmFy"),
    ];

    #[test]
    fn vectors_of_the_standard_round_trip() {
        for (plain, text) in VECTORS {
            assert_eq!(encode(plain.as_bytes()), text);
            assert_eq!(decode(text).as_deref(), Some(plain.as_bytes()));
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "Z", "Zg=", "Zg", "Zh==", "Zm9=", "Z===", "====", "Zg==Zg==", "Zm 9", "Zm-9",
        ] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
