//! Messages between programs and the pool daemon.

use holdfast_api::app::{decode, encode};
use holdfast_api::pool::{FromPool, ToPool};
use serde::{Serialize, de::DeserializeOwned};

/// Decodes any packet in both directions to a message or an error with a text; a message survives encoding and
/// decoding.
pub fn run(data: &[u8]) -> bool {
    let to_pool = is_message::<ToPool>(data);
    let from_pool = is_message::<FromPool>(data);
    to_pool || from_pool
}

fn is_message<T: Serialize + DeserializeOwned>(data: &[u8]) -> bool {
    match decode::<T>(data) {
        Ok(message) => {
            // Compared as bytes, because a load of NaN is not equal to itself.
            let again = encode(&message).expect("it came so");
            let message = decode::<T>(&again).expect("it was made so");
            assert_eq!(encode(&message).as_deref(), Ok(&again[..]));
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}
