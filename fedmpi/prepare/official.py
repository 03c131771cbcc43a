"""Where the files of the official data sets are on the web, and their SHA-256; the only list of them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Official:
    """An official data set: a line about it, the URL of the folder with its files, and each file's name -> SHA-256.

    The checksums are those of TensorFlow Datasets (MNIST, Fashion-MNIST, CIFAR-10) and, as there is no official one, of
    several independent programs that use the file (WikiText-2, Tiny-ImageNet).
    """

    about: str
    url: str
    files: dict


OFFICIAL = {
    "mnist": Official(
        "60,000 + 10,000 handwritten digits of 28x28 pixels, 10 classes",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion_mnist": Official(
        "60,000 + 10,000 images of clothes of 28x28 pixels, 10 classes",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "cifar10": Official(
        "50,000 + 10,000 colour photographs of 32x32 pixels, 10 classes",
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    ),
    "tiny_imagenet": Official(
        "100,000 + 10,000 colour photographs of 64x64 pixels, 200 classes (needs pillow)",
        "https://cs231n.stanford.edu/",
        {"tiny-imagenet-200.zip": "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"},
    ),
    "wikitext2": Official(
        "2,088,628 + 245,569 words of Wikipedia articles, for language modelling",
        "https://wikitext.smerity.com/",  # an author's own page; the original one, research.metamind.io, is closed
        {"wikitext-2-v1.zip": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"},
    ),
}
