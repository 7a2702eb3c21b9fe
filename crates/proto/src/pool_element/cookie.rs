//! Cookies that only elements of the pool can have made.
//!
//! RFC 5352 section 3.8: "a cookie should be signed by the sending PE ASAP Endpoint and the cookie should be verified
//! by the receiving PE's ASAP Endpoint. The details of the verification procedure are out of scope for this document."
//!
//! Here a signed cookie is 32 bytes of HMAC-SHA-256 followed by the state; the code covers the pool's handle too. A
//! user can replay an older cookie of its own: state that must not go back needs a number in it.

use bytes::{Bytes, BytesMut};
use hmac::{Hmac, KeyInit, Mac};
use holdfast_wire::rserpool::PoolHandle;
use sha2::Sha256;
use std::fmt;

/// Label that separates these codes from other uses of the key.
const LABEL: &[u8] = b"holdfast ASAP cookie 1";
const CODE_LENGTH: usize = 32;

/// Key with which the elements of a pool sign their cookies, from a good source of randomness.
#[derive(Clone, PartialEq, Eq)]
pub struct CookieKey(pub [u8; 32]);

/// Hides the key, which would end up in logs.
impl fmt::Debug for CookieKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CookieKey")
    }
}

/// Reason for rejecting a cookie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CookieError {
    /// The cookie is shorter than a signature.
    #[error(
        "the cookie is too short to be signed; is an element of the pool without a cookie key?"
    )]
    Unsigned,
    /// No key of this element made the signature.
    #[error(
        "the cookie is not signed with a key of this pool; give all its elements the same keys"
    )]
    Forged,
}

/// Returns the cookie for a user: the state signed with the first key, or unsigned without keys.
pub(super) fn sign_cookie(keys: &[CookieKey], handle: &PoolHandle, state: &[u8]) -> Bytes {
    let mut cookie = BytesMut::with_capacity(CODE_LENGTH + state.len());
    if let Some(key) = keys.first() {
        cookie.extend_from_slice(&cookie_mac(key, handle, state).finalize().into_bytes());
    }
    cookie.extend_from_slice(state);
    cookie.freeze()
}

/// Verifies a cookie and returns its state.
pub(super) fn verify_cookie(
    keys: &[CookieKey],
    handle: &PoolHandle,
    cookie: &Bytes,
) -> Result<Bytes, CookieError> {
    if keys.is_empty() {
        return Ok(cookie.clone());
    }
    if cookie.len() < CODE_LENGTH {
        return Err(CookieError::Unsigned);
    }
    let state = cookie.slice(CODE_LENGTH..);
    let is_signer = |key: &CookieKey| {
        let mac = cookie_mac(key, handle, &state);
        mac.verify_slice(&cookie[..CODE_LENGTH]).is_ok()
    };
    if keys.iter().any(is_signer) {
        Ok(state)
    } else {
        Err(CookieError::Forged)
    }
}

fn cookie_mac(key: &CookieKey, handle: &PoolHandle, state: &[u8]) -> Hmac<Sha256> {
    // HMAC pads a short key with zeros.
    let mut block = [0; 64];
    block[..key.0.len()].copy_from_slice(&key.0);
    let mut mac = Hmac::<Sha256>::new(&block.into());
    mac.update(LABEL);
    mac.update(&(handle.0.len() as u64).to_be_bytes());
    mac.update(&handle.0);
    mac.update(state);
    mac
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEYS: [CookieKey; 2] = [CookieKey([1; 32]), CookieKey([2; 32])];

    proptest! {
        #[test]
        fn sealed_cookie_opens_with_any_key(state: Vec<u8>, name: String) {
            let handle = PoolHandle::from(name.as_str());
            for key in KEYS {
                let cookie = sign_cookie(&[key], &handle, &state);
                prop_assert_eq!(verify_cookie(&KEYS, &handle, &cookie), Ok(Bytes::from(state.clone())));
            }
        }

        #[test]
        fn modified_cookie_is_rejected(state: Vec<u8>, at: usize, bit in 0..8) {
            let handle = PoolHandle::from("p");
            let mut cookie = sign_cookie(&KEYS, &handle, &state).to_vec();
            let at = at % cookie.len();
            cookie[at] ^= 1u8 << bit;
            prop_assert_eq!(verify_cookie(&KEYS, &handle, &cookie.into()), Err(CookieError::Forged));
        }

        #[test]
        fn open_never_panics_on_any_bytes(bytes: Vec<u8>) {
            let opened = verify_cookie(&KEYS, &PoolHandle::from("p"), &bytes.into());
            prop_assert!(opened.is_err());
        }
    }

    #[test]
    fn cookie_of_other_pool_is_rejected() {
        let cookie = sign_cookie(&KEYS, &PoolHandle::from("p"), b"state");
        assert_eq!(
            verify_cookie(&KEYS, &PoolHandle::from("q"), &cookie),
            Err(CookieError::Forged)
        );
        // The boundary between handle and state counts as well.
        let cookie = sign_cookie(&KEYS, &PoolHandle::from("ps"), b"tate");
        assert_eq!(
            verify_cookie(&KEYS, &PoolHandle::from("p"), &cookie),
            Err(CookieError::Forged)
        );
    }

    #[test]
    fn cookie_without_keys_is_unsigned() {
        let handle = PoolHandle::from("p");
        let cookie = sign_cookie(&[], &handle, b"state");
        assert_eq!(&cookie[..], b"state");
        assert_eq!(verify_cookie(&[], &handle, &cookie), Ok(cookie));
    }
}
