//! Messages of prost in frames of gRPC.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// One kind of messages out, another one in.
pub(crate) struct Frames<Out, In>(PhantomData<(Out, In)>);

impl<Out, In> Default for Frames<Out, In> {
    fn default() -> Self {
        Frames(PhantomData)
    }
}

impl<Out: Message + 'static, In: Message + Default + 'static> Codec for Frames<Out, In> {
    type Encode = Out;
    type Decode = In;
    type Encoder = Frames<Out, In>;
    type Decoder = Frames<Out, In>;

    fn encoder(&mut self) -> Self::Encoder {
        Frames::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        Frames::default()
    }
}

impl<Out: Message, In> Encoder for Frames<Out, In> {
    type Item = Out;
    type Error = Status;

    fn encode(&mut self, item: Out, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(to).map_err(|why| Status::internal(why.to_string()))
    }
}

impl<Out, In: Message + Default> Decoder for Frames<Out, In> {
    type Item = In;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<In>, Status> {
        In::decode(from).map(Some).map_err(|why| Status::invalid_argument(why.to_string()))
    }
}
