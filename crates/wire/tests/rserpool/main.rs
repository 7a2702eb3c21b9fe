//! ASAP and ENRP against what rsplib sends, against Wireshark's dissectors, and against any bytes.

mod codec;
mod dissection;
mod properties;
mod strategies;
mod unrecognized;
mod vectors;
