//! The text form of a join token: `hf1-` and 64 characters.
//!
//! The characters are digits of base 32 (Crockford's alphabet in lower case, without `i`, `l`, `o` and `u`) for 40 bytes: 16
//! of the authority's number, 16 of the secret, 5 of the number of the authority's newest revocation list, 3 of a checksum
//! that finds typing errors.

use std::fmt;
use std::io;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use crate::ca::random_bytes;

const PREFIX: &str = "hf1-";
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const BITS_PER_DIGIT: u32 = 5;
const PART_BYTES: usize = 16;
const LIST_NUMBER_BYTES: usize = 5;
const CHECKSUM_BYTES: usize = 3;
const CONTENT_BYTES: usize = 2 * PART_BYTES + LIST_NUMBER_BYTES;
const TOKEN_BYTES: usize = CONTENT_BYTES + CHECKSUM_BYTES;
const DIGITS: usize = TOKEN_BYTES * 8 / BITS_PER_DIGIT as usize;

/// Identifies an authority: the first 16 bytes of the SHA-256 digest of its public key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AuthorityId(pub [u8; PART_BYTES]);

impl fmt::Display for AuthorityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for AuthorityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuthorityId({self})")
    }
}

/// A join token. The text form ([`fmt::Display`]) is secret.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// The authority that the group's nodes have certificates of.
    pub authority: AuthorityId,
    pub(super) secret: [u8; PART_BYTES],
    /// Number of the authority's revocation list that the node must have at least; 0 if the group has no list.
    list_number: u64,
}

/// A text that is not a join token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The text has another form.
    #[error(
        "not a join token: it begins with `{PREFIX}` and has {DIGITS} more characters; copy the whole line"
    )]
    Form,
    /// A character does not occur in tokens.
    #[error("not a join token: `{0}` does not occur in one; copy the line again")]
    Character(char),
    /// The checksum differs.
    #[error("the join token has a typing error; copy the line again")]
    Checksum,
}

impl JoinToken {
    /// Makes a new token with a random secret.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn generate(authority: AuthorityId) -> io::Result<JoinToken> {
        let mut secret = [0; PART_BYTES];
        random_bytes(&mut secret)?;
        Ok(JoinToken::with_secret(authority, secret))
    }

    /// Returns the token with this secret.
    pub fn with_secret(authority: AuthorityId, secret: [u8; PART_BYTES]) -> JoinToken {
        JoinToken {
            authority,
            secret,
            list_number: 0,
        }
    }

    /// Makes the host that has the token refuse nodes without the authority's revocation list of this number (RFC 5280,
    /// section 5.2.3) or a newer one. The text has at most 2^40 - 1 for a number.
    pub fn require_list(self, number: u64) -> JoinToken {
        JoinToken {
            list_number: number.min((1 << (8 * LIST_NUMBER_BYTES)) - 1),
            ..self
        }
    }

    /// Returns the lowest number of a revocation list that the node must have; 0 if it needs none.
    pub fn list_number(&self) -> u64 {
        self.list_number
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken of authority {}", self.authority)
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = [self.authority.0, self.secret].concat();
        let list_number = self.list_number.to_be_bytes();
        bytes.extend_from_slice(&list_number[list_number.len() - LIST_NUMBER_BYTES..]);
        bytes.extend_from_slice(&checksum(&bytes));
        f.write_str(PREFIX)?;
        let mut digits = String::with_capacity(DIGITS);
        let (mut buffer, mut bits) = (0_u32, 0);
        for byte in bytes {
            buffer = buffer << 8 | u32::from(byte);
            bits += 8;
            while bits >= BITS_PER_DIGIT {
                bits -= BITS_PER_DIGIT;
                let digit = buffer >> bits & 0x1f;
                digits.push(char::from(ALPHABET[digit as usize]));
            }
        }
        f.write_str(&digits)
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<JoinToken, TokenError> {
        let digits = text.trim().strip_prefix(PREFIX).ok_or(TokenError::Form)?;
        if digits.chars().count() != DIGITS {
            return Err(TokenError::Form);
        }
        let mut bytes = Vec::with_capacity(TOKEN_BYTES);
        let (mut buffer, mut bits) = (0_u32, 0);
        for character in digits.chars() {
            let digit = (ALPHABET.iter()).position(|known| char::from(*known) == character);
            let digit = digit.ok_or(TokenError::Character(character))?;
            buffer = (buffer << BITS_PER_DIGIT | digit as u32) & 0xfff;
            bits += BITS_PER_DIGIT;
            if bits >= 8 {
                bits -= 8;
                bytes.push((buffer >> bits) as u8);
            }
        }
        let (content, found) = bytes.split_at(CONTENT_BYTES);
        if checksum(content) != found {
            return Err(TokenError::Checksum);
        }
        let part = |at: usize| {
            let mut part = [0; PART_BYTES];
            part.copy_from_slice(&content[at..at + PART_BYTES]);
            part
        };
        Ok(JoinToken {
            authority: AuthorityId(part(0)),
            secret: part(PART_BYTES),
            list_number: content[2 * PART_BYTES..]
                .iter()
                .fold(0, |number, byte| number << 8 | u64::from(*byte)),
        })
    }
}

/// Returns the SHA-256 digest of `bytes`.
pub fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn checksum(content: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let digest = Sha256::digest(content);
    [digest[0], digest[1], digest[2]]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_is_read_as_the_same_token(authority: [u8; 16], secret: [u8; 16], number: u64) {
            let token = JoinToken::with_secret(AuthorityId(authority), secret).require_list(number);
            let text = token.to_string();
            prop_assert_eq!(text.len(), 68);
            prop_assert_eq!(text.parse(), Ok(token));
        }

        #[test]
        fn any_text_is_a_token_or_an_error(text in ".{0,80}") {
            let _ = text.parse::<JoinToken>();
        }
    }

    #[test]
    fn typing_errors_are_found() {
        let token = JoinToken::with_secret(AuthorityId([1; 16]), [2; 16]);
        let text = token.to_string();
        for position in PREFIX.len()..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[position] = if changed[position] == b'7' {
                b'8'
            } else {
                b'7'
            };
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(changed.parse::<JoinToken>(), Err(TokenError::Checksum));
        }
        assert_eq!(text[1..].parse::<JoinToken>(), Err(TokenError::Form));
        assert_eq!(text[..67].parse::<JoinToken>(), Err(TokenError::Form));
        let other = text.replace('1', "l").replace("hfl", "hf1");
        assert_eq!(other.parse::<JoinToken>(), Err(TokenError::Character('l')));
        assert_eq!(format!(" {text}\n").parse(), Ok(token));
    }

    #[test]
    fn debug_text_has_no_secret() {
        let token = JoinToken::generate(AuthorityId([1; 16])).unwrap();
        let text = token.to_string();
        assert!(!format!("{token:?}").contains(&text[30..]));
        assert_ne!(JoinToken::generate(AuthorityId([1; 16])).unwrap(), token);
    }
}
